"""The cause of death in a program's output. Messages as torch, NCCL, Python, Slurm and the kernel print them."""

import pytest

from llmctl.supervisor.causes.messages import KINDS
from llmctl.supervisor.causes.output import find_cause

T = TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    main(config["x"])\n'
PROGRESS = "".join(f"step {step} loss 3.{step}\n" for step in range(100))

CASES = [
    ("gpu_memory", T + "RuntimeError: CUDA driver error: out of memory"),
    ("gpu_error", T + "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    ("no_gpu", T + "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"),
    ("cancelled", "slurmstepd: error: *** STEP 9.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***"),
    ("container", "FATAL:   container creation failed: mount /x->/y error: mount source /x doesn't exist"),
    ("container", "slurmstepd: error: pyxis: container start failed with error code: 1"),
    ("interrupted", T + "KeyboardInterrupt"),
    ("killed", "mpirun noticed that process rank 3 with PID 0 on node n2 exited on signal 9 (Killed)."),
    ("crash", "mpirun noticed that process rank 3 with PID 9 on node n2 exited on signal 11 (Segmentation fault)."),
    ("no_program", "mpirun was unable to find the specified executable file, and therefore did not launch the job."),
    ("file", T + "OSError: /models/llama does not appear to have a file named config.json."),
    ("usage", "bash: line 3: syntax error near unexpected token `fi'"),
    ("network", T + "OSError: We couldn't connect to 'https://huggingface.co' to load the files"),
    (
        "limits",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 12 of 64: Resource temporarily unavailable",
    ),
    (
        "communication",
        T + "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 3/4 joined",
    ),
    ("gpu_memory", T + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"),
    ("gpu_memory", T + "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 20.00 MiB."),
    ("gpu_memory", T + "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ("gpu_memory", T + "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying"),
    (
        "host_memory",
        T + "RuntimeError: [enforce fail at alloc_cpu.cpp:83] DefaultCPUAllocator: can't allocate memory",
    ),
    ("host_memory", T + "OSError: [Errno 12] Cannot allocate memory"),
    (
        "host_memory_killed",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=77.0. Some of the step tasks have been",
    ),
    ("host_memory_killed", "srun: error: n3: task 11: Out Of Memory\nsrun: error: n1: task 2: Terminated"),
    ("host_memory_killed", "=>> PBS: job killed: mem 193273528kb exceeded limit 188743680kb"),
    ("time_limit", "slurmstepd: error: *** STEP 77.0 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE TO TIME LIMIT ***"),
    ("time_limit", "=>> PBS: job killed: walltime 3619 exceeded limit 3600"),
    ("preempted", "slurmstepd: error: *** JOB 77 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE TO PREEMPTION ***"),
    (
        "node",
        "slurmstepd: error: *** JOB 77 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE TO NODE FAILURE, SEE SLURMCTLD LOG",
    ),
    ("no_gpu", T + "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"),
    ("no_gpu", T + "AssertionError: Torch not compiled with CUDA enabled"),
    ("no_gpu", T + "torch.AcceleratorError: CUDA error: invalid device ordinal"),
    ("gpu_build", T + "RuntimeError: CUDA error: no kernel image is available for execution on the device"),
    ("gpu_hardware", T + "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"),
    ("gpu_hardware", "[812.5] NVRM: Xid (PCI:0000:4e:00): 79, pid=1, GPU has fallen off the bus.\nstep failed"),
    ("gpu_error", T + "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"),
    ("gpu_error", T + "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(`"),
    ("device_mismatch", T + "RuntimeError: Expected all tensors to be on the same device, but found cpu and cuda:0"),
    ("disk_full", T + "OSError: [Errno 28] No space left on device: '/scratch/out/model.pt'"),
    ("quota", T + "OSError: [Errno 122] Disk quota exceeded: '/home/u/.cache'"),
    ("file_system", T + "OSError: [Errno 116] Stale file handle: '/lustre/data/a.bin'"),
    ("file_system", T + "OSError: [Errno 30] Read-only file system: 'x'"),
    (
        "shared_memory",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
    ),
    ("limits", T + "OSError: [Errno 24] Too many open files: '/dev/null'"),
    ("limits", T + "RuntimeError: can't start new thread"),
    ("import", T + "ModuleNotFoundError: No module named 'flash_attn'"),
    ("import", T + "ImportError: /env/x.so: undefined symbol: _ZN3c104cuda9SetDeviceEi"),
    (
        "import",
        "python: error while loading shared libraries: libmpi.so.40: cannot open shared object file: No such file",
    ),
    ("no_program", "/var/spool/job77/script: line 8: torchrun: command not found"),
    (
        "no_program",
        "slurmstepd: error: execve(): train.sh: No such file or directory\nsrun: error: n1: task 0: Exited",
    ),
    ("no_program", "python: can't open file '/work/trian.py': [Errno 2] No such file or directory"),
    ("network", T + "huggingface_hub.errors.GatedRepoError: 401 Client Error. Access to model is restricted."),
    ("network", T + "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='x', port=443): Max retries"),
    (
        "port_in_use",
        T + "torch.distributed.DistNetworkError: The socket has failed to listen (errno: 98 - Address already in use)",
    ),
    ("permission", T + "PermissionError: [Errno 13] Permission denied: '/data/x'"),
    (
        "checkpoint",
        T + "RuntimeError: Error(s) in loading state_dict for GPT:\n\tsize mismatch for a.weight: copying",
    ),
    (
        "checkpoint",
        T + "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
    ),
    ("file", T + "FileNotFoundError: [Errno 2] No such file or directory: '/data/x.bin'"),
    ("not_finite", T + "AssertionError: Rank 3: found NaN in local forward loss calculation. Device: 3"),
    ("not_finite", T + "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output."),
    ("not_finite", "step 1 loss 3.1\nstep 2 loss nan\nstep 3 loss nan\n"),
    (
        "crash",
        'Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n  File "a.py", line 1',
    ),
    ("crash", "/var/spool/job: line 4: 4711 Bus error               (core dumped) python train.py"),
    ("crash", "srun: error: n1: task 3: Segmentation fault (core dumped)\nsrun: error: n1: tasks 0-2: Terminated"),
    ("usage", "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --micro-batchsize 4"),
    ("arithmetic", T + "ZeroDivisionError: division by zero"),
    ("assertion", T + "AssertionError: sequence length 4097 > 4096"),
    ("assertion", T + "AssertionError"),
    ("worker", T + "RuntimeError: DataLoader worker (pid(s) 99) exited unexpectedly"),
    ("killed", "/var/spool/job: line 4: 4711 Killed                  python train.py"),
    (
        "communication",
        T + "torch.distributed.DistBackendError: NCCL error in: ../NCCLUtils.hpp:275, unhandled system error",
    ),
    (
        "communication",
        "[rank2]:[E] ProcessGroupNCCL.cpp:616] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(",
    ),
    (
        "communication",
        T + "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:3391",
    ),
    ("exception", T + "KeyError: 'warmup'"),
    ("exception", T + "mylib.errors.ShapeError: bad shape"),
]


@pytest.mark.parametrize(("kind", "output"), CASES)
def test_each_message_has_its_kind(kind, output):
    found = find_cause(PROGRESS + output + "\n")
    assert found is not None and found.kind == kind
    assert found.line in output.replace("[rank2]:", "")


def test_every_kind_has_a_case():
    assert {kind for kind, _ in CASES} == set(KINDS)


@pytest.mark.parametrize("prefix", ["[rank3]: ", "[default1]:", "[1,3]<stderr>:", "3: ", "2026-01-02 03:04:05,678 "])
def test_names_of_ranks_and_times_before_a_line_do_not_hide_it(prefix):
    text = "".join(
        f"{prefix}{line}\n" for line in (TRACEBACK + "ModuleNotFoundError: No module named 'x'").splitlines()
    )
    assert find_cause(text)[:2] == ("import", "ModuleNotFoundError: No module named 'x'")


@pytest.mark.parametrize(
    "output",
    [
        "",
        PROGRESS,
        "loading checkpoint\nno error found, 0 permission problems\nfile a.txt written\n",
        f"{TRACEBACK}ModuleNotFoundError: No module named 'apex'\nusing the fallback\n{PROGRESS}",
        "UserWarning: CUDA initialization: Found no NVIDIA driver on your system.\nstep 1\n",
        "n1:22:23 [0] NCCL INFO NET/IB : No device found.\nstep 1\n",
        "srun: error: n1: task 0: Exited with exit code 1\n",
    ],
)
def test_no_cause_is_made_up(output):
    assert find_cause(output) is None


def test_an_error_that_the_program_survived_is_not_the_cause():
    early = f"{TRACEBACK}FileNotFoundError: [Errno 2] No such file or directory: 'cache'\n"
    found = find_cause(f"{early}{PROGRESS}{TRACEBACK}KeyError: 'lr'\n")
    assert found[:2] == ("exception", "KeyError: 'lr'")


def test_the_source_lines_of_a_traceback_are_not_errors():
    text = TRACEBACK.replace('main(config["x"])', 'raise FileNotFoundError("CUDA out of memory")') + "KeyError: 'a'\n"
    assert find_cause(text)[:2] == ("exception", "KeyError: 'a'")


def test_the_rank_that_failed_first_counts_not_the_peers_that_lost_it():
    lost = "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:3391"
    dead = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    ranks = [(2, lost), (0, dead), (1, lost)]
    text = "".join(f"[rank{rank}]: {line}\n" for rank, words in ranks for line in (TRACEBACK + words).splitlines())
    assert find_cause(text)[:2] == ("gpu_memory", dead)


def test_a_report_of_torchrun_is_no_exception_of_the_program():
    report = (
        "E0102 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9) local_rank: 1 (pid: 12)\n"
        f"{TRACEBACK}torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "====\ntrain.py FAILED\n----\nRoot Cause (first observed failure):\n[0]:\n"
        "  time      : 2026-01-02_03:04:05\n  host      : n1\n  rank      : 1 (local_rank: 1)\n"
        "  exitcode  : -9 (pid: 12)\n  error_file: <N/A>\n  traceback : Signal 9 (SIGKILL) received by PID 12\n====\n"
    )
    found = find_cause(PROGRESS + report)
    assert found is not None and found.kind == "killed"
    own = find_cause(f"{PROGRESS}{TRACEBACK}ValueError: bad\n{report.replace('-9', '1').replace('SIGKILL', 'x')}")
    assert own[:2] == ("exception", "ValueError: bad")


def test_the_word_of_the_system_counts_more_than_the_errors_that_it_makes():
    killed = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE TO TIME LIMIT ***"
    text = f"{killed}\n{TRACEBACK}RuntimeError: Connection reset by peer\n"
    assert find_cause(text)[:2] == ("time_limit", killed)


def test_a_chain_of_exceptions_has_the_more_special_one():
    chain = "\nDuring handling of the above exception, another exception occurred:\n\n"
    text = f"{TRACEBACK}OSError: [Errno 28] No space left on device\n{chain}{TRACEBACK}ValueError: cannot save\n"
    assert find_cause(text)[:2] == ("disk_full", "OSError: [Errno 28] No space left on device")


def test_a_message_of_any_length_ends():
    assert find_cause("Error: " + "nan " * 1_000_000 + "\n" + "a" * 5_000_000) is not None

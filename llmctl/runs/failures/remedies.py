"""The kinds of causes that the supervisor reads in an output: their meaning, and what helps. Pure."""

from typing import NamedTuple


class Remedy(NamedTuple):
    """A kind of cause in words, and what to do; both to follow the name of a run."""

    title: str
    advice: str


REMEDIES = {
    "time_limit": Remedy("reached the scheduler's time limit", "give more with --time, or save and resume"),
    "preempted": Remedy("preempted by another job", "resume it, or use a queue that is not preempted"),
    "node": Remedy("a node failed", "submit again, with --exclude NODE if the same one fails"),
    "host_memory_killed": Remedy(
        "killed for its use of host memory", "use fewer data workers or ranks per node, or ask for more memory"
    ),
    "gpu_memory": Remedy(
        "out of GPU memory",
        "use a smaller micro batch, recompute activations, or shard over more GPUs; llmctl plan has the sizes",
    ),
    "host_memory": Remedy("out of host memory", "use fewer data workers or ranks per node, or ask for more memory"),
    "no_gpu": Remedy(
        "no usable GPU", "check the resource type, the driver (nvidia-smi), and that torch has CUDA: llmctl doctor"
    ),
    "gpu_build": Remedy(
        "a kernel that was not built for this GPU", "install packages that are built for its architecture"
    ),
    "device_mismatch": Remedy("tensors on different devices", "move both to the device that the message names"),
    "gpu_hardware": Remedy("a fault of a GPU", "leave the node out with --exclude, and tell the site"),
    "gpu_error": Remedy(
        "an error in a GPU kernel", "run again with CUDA_LAUNCH_BLOCKING=1 for the place; check indices against sizes"
    ),
    "disk_full": Remedy("a full disk", "make room, or write to another file system"),
    "quota": Remedy("a used-up quota", "delete what is not needed, or write to a work area"),
    "file_system": Remedy("a failing file system", "check the mount on the node; resume once it is back"),
    "shared_memory": Remedy(
        "too little shared memory", "use fewer data workers, or a larger /dev/shm in the container"
    ),
    "limits": Remedy(
        "a limit on files, threads or processes", "raise it (ulimit -n, ulimit -u), or start fewer workers"
    ),
    "import": Remedy(
        "a module or library that is missing", "install it in the job's environment; check modules and paths"
    ),
    "no_program": Remedy(
        "a program that is not there", "check its path on the nodes, and the modules that the job loads"
    ),
    "network": Remedy(
        "no answer from the network", "fetch what it needs on the login node first; nodes may be offline"
    ),
    "port_in_use": Remedy("a port that is in use", "use MASTER_PORT of the job, which llmctl has found free"),
    "permission": Remedy("a permission that is missing", "check owner and mode of the path in the message"),
    "checkpoint": Remedy("a checkpoint that does not fit, or is damaged", "check its model's sizes; take an older one"),
    "file": Remedy("a file that is missing", "check the path on the nodes, and whether they mount it"),
    "not_finite": Remedy(
        "numbers that are not finite", "lower the learning rate, check the data of that step, or train in bf16"
    ),
    "crash": Remedy("a crash in native code", "look for mixed versions of libraries; run one rank under a debugger"),
    "usage": Remedy("arguments that the program does not take", "correct the command line"),
    "cancelled": Remedy("cancelled in the scheduler", "resume it, if you did not mean to end it"),
    "container": Remedy(
        "the container did not start", "check the image's name, the rights to fetch it, and that each mount is there"
    ),
    "interrupted": Remedy("interrupted by a signal", "resume it, if you did not mean to end it"),
    "arithmetic": Remedy("an impossible calculation", "see the line of the traceback: llmctl logs RUN --rank failed"),
    "assertion": Remedy("a failed assertion", "see the line of the traceback: llmctl logs RUN --rank failed"),
    "worker": Remedy("a data worker that died", "it is often out of memory: use fewer workers, and look at the node"),
    "killed": Remedy("killed by a signal", "look for a lack of memory, or who sent it"),
    "communication": Remedy(
        "lost communication between ranks", "find the rank that failed first: llmctl logs RUN --rank failed"
    ),
    "exception": Remedy("an error in the program", "see its traceback: llmctl logs RUN --rank failed"),
}
"""Kind (llmctl/supervisor/causes/messages.py) -> words."""

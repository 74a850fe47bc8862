"""Options of launchers and containers: which take a value, and their meaning for a job.

Manuals: torchrun (torch/distributed/run.py), mpirun(1) of Open MPI and MPICH's Hydra, deepspeed/launcher/runner.py,
srun(1) with pyxis, singularity-exec, docker-run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

NODES, RANKS_PER_NODE, RANKS, IMAGE, MOUNTS, EXCLUDE, ENV, ENV_PAIR, FOLDER = (
    *("nodes", "ranks per node", "ranks", "image", "mounts", "exclude", "env", "env pair", "folder"),
)


@dataclass(frozen=True)
class Launcher:
    """A program in front of another.

    Attributes:
        meant: option without dashes, words joined by ``_`` -> its meaning.
        valued: further options with one value.
        paired: options with two values.
        is_image: True if the image follows the options.
        verbs: words that may follow the program's name.
        modules: options that make the next word the name of a module.
        operands: number of words between the options and the program.
    """

    meant: dict[str, str] = field(default_factory=dict)
    valued: frozenset[str] = frozenset()
    paired: frozenset[str] = frozenset()
    is_image: bool = False
    verbs: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()
    operands: int = 0


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TORCHRUN = Launcher(
    {"nnodes": NODES, "nproc_per_node": RANKS_PER_NODE},
    _words(
        "node_rank master_addr master_port rdzv_backend rdzv_endpoint rdzv_id rdzv_conf max_restarts monitor_interval "
        "start_method role log_dir r redirects t tee local_addr local_ranks_filter logs_specs event_log_handler"
    ),
    modules=_words("m module"),
)
_MPI = Launcher(
    {
        **dict.fromkeys(("np", "n", "c"), RANKS),
        **dict.fromkeys(("npernode", "N", "ppn", "perhost"), RANKS_PER_NODE),
        **dict.fromkeys(("x", "env_once"), ENV),
        **dict.fromkeys(("genv", "env"), ENV_PAIR),
        **dict.fromkeys(("wdir", "wd"), FOLDER),
    },
    _words(
        "hostfile machinefile machine_file f H host hosts map_by bind_to rank_by timeout prefix bootstrap "
        "launcher iface tune output_filename stdin report_pid "
        "cpu_set cpus_per_proc cpus_per_rank am app default_hostfile"
    ),
    _words("mca gmca genv env pmca prtemca"),
)
_DEEPSPEED = Launcher(
    {"num_nodes": NODES, "num_gpus": RANKS_PER_NODE},
    _words(
        "hostfile H include i exclude e master_port master_addr launcher launcher_args node_rank ssh_port autotuning "
        "enable_each_rank_log elastic_training min_elastic_nodes max_elastic_nodes bind_core_list venv_script"
    ),
    modules=_words("module"),
)
_SRUN = Launcher(
    {
        **dict.fromkeys(("N", "nodes"), NODES),
        **dict.fromkeys(("n", "ntasks"), RANKS),
        **dict.fromkeys(("ntasks_per_node", "gpus_per_node", "gres"), RANKS_PER_NODE),
        "container_image": IMAGE,
        "container_mounts": MOUNTS,
        **dict.fromkeys(("x", "exclude"), EXCLUDE),
        **dict.fromkeys(("D", "chdir", "container_workdir"), FOLDER),
    },
    _words(
        "G gpus c cpus_per_task container_name container_env container_save mpi "
        "w nodelist p partition A account t time J job_name o output e error i input export jobid "
        "cpu_bind gpu_bind gpus_per_task mem mem_bind mem_per_gpu mem_per_cpu wait W threads_per_core distribution m "
        "network reservation q qos C constraint d dependency het_group"
    ),
)
_SINGULARITY = Launcher(
    {**dict.fromkeys(("bind", "B"), MOUNTS), "env": ENV, **dict.fromkeys(("pwd", "cwd"), FOLDER)},
    _words("workdir W home H overlay o env_file app scratch S network hostname mount security docker_login"),
    is_image=True,
    verbs=_words("exec run"),
)
_DOCKER = Launcher(
    {
        **dict.fromkeys(("v", "volume"), MOUNTS),
        **dict.fromkeys(("e", "env"), ENV),
        **dict.fromkeys(("w", "workdir"), FOLDER),
    },
    _words(
        "mount gpus shm_size ulimit name network net ipc u user device entrypoint env_file p publish "
        "hostname h cap_add security_opt memory m cpus cpuset_cpus runtime pid l label "
        "log_driver log_opt platform tmpfs add_host"
    ),
    is_image=True,
    verbs=_words("run exec"),
)
_ACCELERATE = Launcher(
    {"num_machines": NODES, "num_processes": RANKS},
    _words(
        "config_file machine_rank main_process_ip main_process_port rdzv_backend mixed_precision gpu_ids "
        "deepspeed_config_file deepspeed_hostfile zero_stage gradient_accumulation_steps num_cpu_threads_per_process "
        "max_restarts monitor_interval same_network"
    ),
    verbs=_words("launch"),
    modules=_words("m module"),
)
_APRUN = Launcher(
    {"n": RANKS, "pes": RANKS, "N": RANKS_PER_NODE, "pes_per_node": RANKS_PER_NODE, "e": ENV},
    _words("d cc j S depth cpu_binding cpus_per_cu L node_list m memory_per_pe p r"),
)
_NSYS = Launcher(
    valued=_words(
        "s sample t trace o output c capture_range x stop_on_exit w show_output f force_overwrite b y delay d "
        "duration n inherit_environment e env_var capture_range_end cuda_memory_usage cpuctxsw kill wait stats export "
        "gpu_metrics_device gpu_metrics_devices cuda_graph_trace python_backtrace session_new nic_metrics"
    ),
    verbs=_words("profile"),
)
_PLAIN = Launcher()

LAUNCHERS: dict[str, Launcher] = {
    "torchrun": _TORCHRUN,
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": _TORCHRUN,
    **dict.fromkeys(("mpirun", "mpiexec", "orterun", "mpiexec.hydra", "mpirun_rsh"), _MPI),
    "deepspeed": _DEEPSPEED,
    "srun": _SRUN,
    **dict.fromkeys(("singularity", "apptainer"), _SINGULARITY),
    **dict.fromkeys(("docker", "podman"), _DOCKER),
    **dict.fromkeys(("exec", "nohup", "command", "time", "sudo"), _PLAIN),
    "uv": Launcher({"directory": FOLDER}, _words("p python with extra group project env_file"), verbs=_words("run")),
    "accelerate": _ACCELERATE,
    "accelerate.commands.launch": _ACCELERATE,
    "aprun": _APRUN,
    "nsys": _NSYS,
    "timeout": Launcher(valued=_words("k kill_after s signal"), operands=1),
    **dict.fromkeys(("conda", "mamba"), Launcher({"cwd": FOLDER}, _words("n name p prefix"), verbs=_words("run"))),
    "numactl": Launcher(valued=_words("m N C i p")),
    **dict.fromkeys(("ssh", "rsh"), Launcher(valued=_words("b c D E e F I i J L l m O o p Q R S W w"), operands=1)),
    "taskset": Launcher(valued=_words("c")),
    "env": Launcher(dict.fromkeys(("C", "chdir"), FOLDER), _words("u S")),
    "nice": Launcher(valued=_words("n adjustment")),
    "stdbuf": Launcher(valued=_words("i o e")),
}
"""Name of the program, or of torch's module -> its options."""

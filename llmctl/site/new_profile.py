"""The text of a new cluster profile: the values given, and every other key as a comment that says what it is for."""

import json
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class NewProfile:
    """What is known about a new cluster; the fields are those of ClusterProfile."""

    scheduler: str
    runs_root: str
    description: str = ""
    login: str | None = None
    hosts: tuple[str, ...] = ()
    group: str | None = None
    resource_type: str | None = None
    gpus: int | None = None
    interface: str | None = None
    kind: str | None = None
    path: str | None = None
    python: str | None = None
    modules: tuple[str, ...] = ()


_SIZES = {
    "slurm": "# `sinfo -N -o '%N %P %c %m %G'` shows what there is.",
    "sge": "# In the site's own words (`qconf -sc`): the name stands in -l NAME=N.",
    "pbs": "# In the site's own words (`qstat -Q`): the name is the queue, unless `queue` says another.",
    "ssh": "# GPUs of each machine.",
}
_TYPE = {
    "slurm": "{gpus: 8, gpu: H100, cores: 96, queue: main, max_nodes: 16, max_time: '24:00:00'}",
    "sge": "{gpus: 4, gpu: A100, cores: 40, max_nodes: 16, max_time: '24:00:00'}",
    "pbs": "{gpus: 8, gpu: H100, cores: 96, max_nodes: 16, max_time: '24:00:00'}",
    "ssh": "{gpus: 8, gpu: A100}",
}
_LAUNCHERS = {
    "slurm": "torchrun   # or srun (a process per rank), mpirun",
    "sge": "mpirun   # or torchrun",
    "pbs": "torchrun   # or mpirun",
    "ssh": "torchrun   # or mpirun, which needs ssh from the first machine to the others",
}
_GROUPS = {
    "slurm": "The account (sbatch --account).",
    "sge": "The group (qsub -g, on the command line).",
    "pbs": "The group (qsub -P; group_option says where it is -A or -W group_list).",
}


def profile_text(profile: NewProfile) -> str:
    """YAML with comments. Values are written as JSON strings, which YAML reads the same whatever they hold."""
    has_queue = profile.scheduler in _GROUPS
    lines = [
        "# A cluster of your own. Check it with `llmctl clusters validate` and `llmctl doctor`.",
        "# Every key is explained in the bundled profile slurm: `llmctl clusters show slurm` names its file.",
        f"description: {json.dumps(profile.description)}",
        f"scheduler: {profile.scheduler}",
        *(_place(profile, has_queue)),
        *(_group(profile) if has_queue or profile.group else []),
        *(_resources(profile) if profile.scheduler != "local" else []),
        *_environment(profile),
        *_meeting(profile),
        "# Variables that every job gets.",
        '# env: {NCCL_SOCKET_IFNAME: ib0, HTTPS_PROXY: "http://proxy:3128"}',
        "# Seconds that a run gets to save once it has been told to stop.",
        "# stop_grace_s: 120",
    ]
    return "\n".join(lines) + "\n"


def _place(profile: NewProfile, has_queue: bool) -> list[str]:
    lines = [
        "# Holds the run directories; on a file system that all nodes share, with room for checkpoints.",
        f"runs_root: {json.dumps(profile.runs_root)}",
    ]
    if has_queue:
        lines += [
            "# The login node as ssh knows it. Without it this machine is one.",
            f"login: {{host: {json.dumps(profile.login)}}}" if profile.login else "# login: {host: cluster}",
        ]
    if profile.scheduler == "ssh":
        lines += [
            "# The machines, the head first, as ssh knows them.",
            f"hosts: {_list(profile.hosts)}" if profile.hosts else "# hosts: [gpu1, gpu2]",
            "# false: they share no folder, and each keeps a run directory of its own.",
            "# shared: true",
        ]
    return lines


def _group(profile: NewProfile) -> list[str]:
    return [
        f"# {_GROUPS.get(profile.scheduler, 'What is billed to.')} --group and LLMCTL_GROUP go before it.",
        f"group: {json.dumps(profile.group)}" if profile.group else "# group: my-group",
        "# true: the site refuses jobs without one, so llmctl asks for it first.",
        "# group_required: true",
    ]


def _resources(profile: NewProfile) -> list[str]:
    lines = [f"# The kinds of nodes. {_SIZES[profile.scheduler][2:]}"]
    if profile.resource_type is None:
        return [
            *lines,
            "# resource_types:",
            f"#   gpu: {_TYPE[profile.scheduler]}",
            "# defaults: {resource_type: gpu, time: '1:00:00'}",
        ]
    name = json.dumps(profile.resource_type)
    return [
        *lines,
        f"# Further keys: {_TYPE[profile.scheduler]}",
        "resource_types:",
        f"  {name}: {{gpus: {profile.gpus or 0}}}",
        f"defaults: {{resource_type: {name}}}",
        "# What is refused before the queue does it.",
        "# limits: {max_nodes: 16, max_time: '24:00:00'}",
    ]


def _environment(profile: NewProfile) -> list[str]:
    lines = [
        f"  modules: {_list(profile.modules)}" if profile.modules else "  # modules: [cuda/12.8]",
        f"  kind: {profile.kind}" if profile.kind else "  # kind: venv            # or conda, or container",
        f"  path: {json.dumps(profile.path)}" if profile.path else "  # path: ~/venvs/llm      # goes with kind",
        f"  python: {json.dumps(profile.python)}"
        if profile.python
        else "  # python: /usr/bin/python3   # instead of the environment's own",
        '  # setup: ["ulimit -n 65536"]  # shell lines, taken as they are',
    ]
    is_set = bool(profile.modules or profile.kind or profile.python)
    return [
        "# The Python environment that jobs run in.",
        "environment:" if is_set else "# environment:",
        *(lines if is_set else (f"# {line.replace('# ', '', 1)}" for line in lines)),
    ]


def _meeting(profile: NewProfile) -> list[str]:
    lines = [
        "# Where the ranks meet: the interface of the head node's address, and ports.",
        f"rendezvous: {{interface: {json.dumps(profile.interface)}, ports: [20000, 29999]}}"
        if profile.interface
        else "# rendezvous: {interface: ib0, ports: [20000, 29999]}",
    ]
    if profile.scheduler != "local":
        lines += [
            "# How ranks are started.",
            f"# launch: {{launcher: {_LAUNCHERS[profile.scheduler].replace('   #', '}   #')}",
            "# How images are run (--container): pyxis, enroot, apptainer or singularity.",
            "# container: {runtime: apptainer, options: ['--nv']}",
        ]
    return lines


def _list(words: Sequence[str]) -> str:
    return json.dumps(list(words))

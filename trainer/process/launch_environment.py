"""Rank and rendezvous of this process, from torchrun, srun, mpirun or the shell. Torch-free.

Sources: torchrun's variables (https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables), "OUTPUT
ENVIRONMENT VARIABLES" of srun(1), Open MPI's ``OMPI_COMM_WORLD_*`` (mpirun(1)), ``PMI_*`` of MPICH's hydra, Intel MPI
and Cray, and Azure Batch's AZ_BATCH_MASTER_NODE.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_PORT = 29500
"""torchrun's default, used if no variable identifies the job."""

_PORT_RANGE = (20000, 29999)
"""Below Linux's ephemeral ports (net.ipv4.ip_local_port_range starts at 32768), so that no client socket uses them."""

_JOB_IDS = (
    *("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID"),
    *("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"),
)


class LaunchError(ValueError):
    """The environment gives no rank, or contradicting values. The message is one sentence."""


@dataclass(frozen=True)
class LaunchEnvironment:
    """Rank of this process, world size and rendezvous.

    Attributes:
        launcher: source of the values: torchrun, Open MPI, PMI, Slurm, environment or nothing.
        gpus_per_node: GPUs of the job on each node (0: none); None: unknown.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT
    launcher: str = "nothing"
    gpus_per_node: int | None = None

    @property
    def is_on_one_machine(self) -> bool:
        """True if all ranks are processes of one machine: all are local, or they meet at its loopback address.

        The nodes of a job on cluster local are such processes.
        """
        is_loopback = self.master_addr in ("localhost", "::1") or self.master_addr.startswith("127.")
        return self.local_world_size == self.world_size or is_loopback

    def as_variables(self) -> dict[str, str]:
        """Environment variables that torch.distributed and its users read."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


@dataclass(frozen=True)
class _Source:
    """Variables of one launcher.

    If a value has several names, the first variable that is set counts.
    """

    name: str
    rank: tuple[str, ...]
    local_rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_world_size: tuple[str, ...]


_EXPLICIT = _Source("environment", ("RANK",), ("LOCAL_RANK",), ("WORLD_SIZE",), ("LOCAL_WORLD_SIZE",))

# The innermost launcher is first: with mpirun inside a Slurm step, SLURM_PROCID describes mpirun's daemons.
_LAUNCHERS = (
    _Source(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Source(
        "PMI",
        ("PMI_RANK",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("PMI_SIZE",),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    _Source(
        "Slurm",
        ("SLURM_PROCID",),
        ("SLURM_LOCALID",),
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    ),
)


def resolve_launch_environment(environ: Mapping[str, str]) -> LaunchEnvironment:
    """Resolve the rank of this process from torchrun's or else the launcher's variables.

    Under torchrun the scheduler's variables describe torchrun's agents, not the ranks, and are ignored. Otherwise a
    script may have exported RANK and similar variables, which must agree with the launcher's.

    Raises:
        LaunchError: variables contradict each other, a value is not a number, or a required value is missing.
    """
    launcher = None if "TORCHELASTIC_RUN_ID" in environ else _find_launcher(environ)
    explicit = _read(_EXPLICIT, environ)
    found = _merged(explicit, _read(launcher, environ)) if launcher else explicit
    if not found:
        return LaunchEnvironment(gpus_per_node=_gpus_per_node(environ))
    rank, world_size = _required(found, "rank"), _required(found, "world_size")
    if rank[1] >= world_size[1]:
        raise LaunchError(
            f"{rank[0]}={rank[1]} is not below {world_size[0]}={world_size[1]}; ranks are numbered from 0"
        )
    local_rank, local_size = _local(found, rank[1], world_size[1], environ)
    return LaunchEnvironment(
        rank=rank[1],
        local_rank=local_rank,
        world_size=world_size[1],
        local_world_size=local_size,
        master_addr=_master_addr(environ, world_size[1], local_size),
        master_port=_master_port(environ),
        launcher=launcher.name if launcher else ("torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment"),
        gpus_per_node=_gpus_per_node(environ),
    )


def _find_launcher(environ: Mapping[str, str]) -> _Source | None:
    for source in _LAUNCHERS:
        if any(name in environ for name in source.rank):
            # sbatch gives its batch script SLURM_PROCID=0 and the job's SLURM_NTASKS, although only one shell runs.
            # Only srun, which starts the tasks, sets the step.
            if source.name == "Slurm" and "SLURM_STEP_ID" not in environ:
                continue
            return source
    return None


def _read(source: _Source, environ: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    found = {}
    for field in ("rank", "local_rank", "world_size", "local_world_size"):
        name = next((name for name in getattr(source, field) if environ.get(name, "") != ""), None)
        if name is None:
            continue
        text = environ[name]
        if "TASKS_PER_NODE" in name:
            text = _tasks_on_node(name, text, environ)
        if not re.fullmatch(r"\d+", text):
            raise LaunchError(f"{name}={text} is not a whole number; correct or unset it")
        found[field] = (name, int(text))
    return found


def _tasks_on_node(name: str, text: str, environ: Mapping[str, str]) -> str:
    """Tasks on this node from Slurm's run-length encoded list, such as ``4(x2),3``."""
    counts: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise LaunchError(f"{name}={text} is not a list of tasks per node as Slurm writes it, such as 4(x2),3")
        counts += [match[1]] * int(match[2] or 1)
    node = environ.get("SLURM_NODEID", "0")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else counts[0]


def _merged(explicit: dict[str, tuple[str, int]], detected: dict[str, tuple[str, int]]) -> dict[str, tuple[str, int]]:
    for field in explicit.keys() & detected.keys():
        (name, value), (other_name, other) = explicit[field], detected[field]
        if value != other:
            raise LaunchError(
                f"{name}={value} contradicts {other_name}={other}; unset {name}, or start one process per rank with "
                "one launcher only"
            )
    return {**detected, **explicit}


def _required(found: dict[str, tuple[str, int]], field: str) -> tuple[str, int]:
    if field not in found:
        name = getattr(_EXPLICIT, field)[0]
        known = ", ".join(f"{name}={value}" for name, value in found.values())
        raise LaunchError(f"{name} is not set although {known} is; start the trainer with torchrun, srun or mpirun")
    return found[field]


def _local(
    found: dict[str, tuple[str, int]], rank: int, world_size: int, environ: Mapping[str, str]
) -> tuple[int, int]:
    size_name, size = found.get("local_world_size", ("", 0))
    if not size:
        nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
        size = max(1, world_size // max(1, int(nodes))) if nodes.isdigit() else world_size
        size_name = "LOCAL_WORLD_SIZE (derived)"
    if size > world_size:
        raise LaunchError(f"{size_name}={size} is above the world size {world_size}; correct or unset it")
    local_name, local_rank = found.get("local_rank", ("LOCAL_RANK (derived)", rank % size))
    if local_rank >= size:
        raise LaunchError(f"{local_name}={local_rank} is not below {size_name}={size}; local ranks are numbered from 0")
    return local_rank, size


def _master_addr(environ: Mapping[str, str], world_size: int, local_world_size: int) -> str:
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    if world_size == local_world_size:
        return "127.0.0.1"
    batch_master = _azure_master(environ)
    if batch_master is not None:
        return batch_master[0]
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if nodes:
        return first_host(nodes)
    raise LaunchError(
        f"MASTER_ADDR is not set, but the {world_size} ranks are on several nodes; set it to the address of rank 0's "
        "node"
    )


def _azure_master(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Address and port from AZ_BATCH_MASTER_NODE (``address:port``) of Azure Batch's multi-instance tasks.

    Source: "Azure Batch runtime environment variables",
    https://learn.microsoft.com/azure/batch/batch-compute-node-environment-variables
    """
    text = environ.get("AZ_BATCH_MASTER_NODE", "")
    if not text:
        return None
    address, colon, port = text.rpartition(":")
    if not colon or not address or not port.isdigit() or not 0 < int(port) < 65536:
        raise LaunchError(
            f"AZ_BATCH_MASTER_NODE={text} is not ADDRESS:PORT; unset it, or set MASTER_ADDR and MASTER_PORT"
        )
    return address, int(port)


def first_host(node_list: str) -> str:
    """First host of a Slurm node list such as ``gpu[003-005,9],login1``.

    Raises:
        LaunchError: the list is empty or its brackets do not match.
    """
    match = re.match(r"([^\[\],\s]*)(?:\[(\d+)[^\[\]]*\]([^\[\],\s]*))?", node_list)
    host = "".join(part or "" for part in match.groups()) if match else ""
    if not host or ("[" in node_list and "]" not in node_list):
        raise LaunchError(f"the node list {node_list!r} names no host; set MASTER_ADDR to the address of rank 0's node")
    return host


def _master_port(environ: Mapping[str, str]) -> int:
    text = environ.get("MASTER_PORT", "")
    if text:
        if not text.isdigit() or not 0 < int(text) < 65536:
            raise LaunchError(f"MASTER_PORT={text} is not a port; use a number from 1 to 65535")
        return int(text)
    batch_master = _azure_master(environ)
    if batch_master is not None:
        return batch_master[1]
    # All ranks must choose the same port without communication, so derive the port from the job id.
    job = next((f"{environ[name]}.{environ.get('SLURM_STEP_ID', '')}" for name in _JOB_IDS if environ.get(name)), None)
    return DEFAULT_PORT if job is None else port_of_job(job, *_PORT_RANGE)


def port_of_job(job_id: str, low: int, high: int) -> int:
    """Port hashed from the job id, so that jobs on one node rarely collide."""
    digest = hashlib.sha256(job_id.encode()).digest()
    return low + int.from_bytes(digest[:8], "big") % (high - low + 1)


def _gpus_per_node(environ: Mapping[str, str]) -> int | None:
    text = environ.get("LLMCTL_GPUS_PER_NODE", "")
    if text.isdigit():
        return int(text)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    return len([device for device in visible.split(",") if device.strip() not in ("", "-1", "NoDevFiles")])

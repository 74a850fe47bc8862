"""One node or rank of an attempt: its log, variables and command."""

import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from types import FrameType
from typing import Dict, Mapping, NamedTuple, Optional, Sequence

from . import processes
from .attempt import Attempt, AttemptError, read_secrets
from .causes.starts import is_shells_end
from .ends import part_name, write_end
from .settings import JobSettings
from .signals import Signals
from .trust import OWN_FOLDER

FLIGHT_FOLDER = "flight"
"""Folder of an attempt in which each rank leaves the collectives that it has entered, when NCCL times out."""
FLIGHT_ENTRIES = "2000"
"""Most entries of such a record: the collectives of some steps, in about 1 MB."""
_POLL_S = 1.0
_GONE_S = 10.0
"""Time that killed processes of an earlier attempt get to end."""
_OTHERS_START_S = 5.0
"""Time that a node which cannot start the program leaves the others to start theirs, before its end ends them too."""
_SHELL = "bash"
_TAIL_BYTES = 4096
_SURVIVED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)
"""Signals that end the command of a node, but not the process that records the command's end."""


class CommandEnd(NamedTuple):
    """End of a command: its status, as of ``Popen``, and the kernel's name of the last program that it was."""

    status: int
    program: str


def end_file_of(attempt_dir: str) -> str:
    """Path of the file that asks all nodes of an attempt to end; see end_request.EndByFile."""
    return f"{attempt_dir}/.end"


def rank_of_launcher(environ: Mapping[str, str]) -> int:
    """The rank of this process, from the variables of its launcher.

    The innermost launcher counts: mpirun leaves Slurm's variables in the environment.
    """
    text = environ.get("OMPI_COMM_WORLD_RANK") or environ.get("PMI_RANK")
    if not text and environ.get("SLURM_STEP_ID"):
        text = environ.get("SLURM_PROCID")
    return int(text or 0)


def run_node(
    job: JobSettings,
    environ: Mapping[str, str],
    attempt: int,
    address: str,
    port: str,
    node: Optional[int],
    *,
    guarded: bool,
) -> int:
    """Run the part "rank" of job.sh, and record its end.

    Args:
        job: settings.
        environ: of this process.
        attempt: number of the attempt.
        address: MASTER_ADDR; "-" for none.
        port: MASTER_PORT; "-" for none.
        node: number of this node; None: take the number from the launcher's variables.
        guarded: the launcher must not be signalled: end the command when a file asks for the end.

    Returns:
        The command's exit code.

    Raises:
        AttemptError: this node does not see the file of the secrets, or an earlier attempt still has processes here.
    """
    folder = job.attempt_dir(attempt)
    part = node
    if node is None or part is None:
        part = rank_of_launcher(environ)
        node = part // job.ranks_per_node if job.one_process_per_rank else part
    log = f"{folder}/node-{node:05d}.log"
    _write_to(log)
    left = processes.kill_earlier_attempts(job.run_dir, attempt, _GONE_S) if attempt > 1 else []
    if left:
        pids = ", ".join(map(str, left))
        raise AttemptError(f"processes {pids} of an earlier attempt still live on {socket.gethostname()}")
    variables = {**environ, **attempt_variables(job, attempt)}
    if not job.secrets_are_read_once:
        variables.update(read_secrets(job))
    variables["NODE_RANK"] = str(node)
    variables["MASTER_ADDR"] = "" if address == "-" else address
    variables["MASTER_PORT"] = "" if port == "-" else port
    argv = ["bash", f"{folder}/job.sh", "rank"]
    end = guard(argv, variables, end_file_of(folder)) if guarded else _outlive(argv, variables)
    status, ended_at = end.status, time.time()
    if status != 0 and job.is_training and not job.one_process_per_rank:
        # Ranks whose agent was killed: the launcher may no longer know them, and stopped ones do not notice.
        processes.kill_node(job.run_dir, attempt, node)
    started = _has_started(job, end, log)
    if started is False and status > 0 and job.nodes > 1:
        time.sleep(_OTHERS_START_S)
    write_end(Attempt(attempt, folder), part_name(job, part), status, ended_at, started)
    return processes.exit_code(status)


def attempt_variables(job: JobSettings, attempt: int) -> Dict[str, str]:
    """Variables of every process of an attempt; the user's own ones, which job.sh sets later, come before them."""
    folder = job.attempt_dir(attempt)
    # Without a command it is our trainer, with torch 2.10 or later, which warns of the names before.
    size, path = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE")
    if not job.is_training:
        size, path = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    return {
        size: FLIGHT_ENTRIES,
        path: f"{folder}/{FLIGHT_FOLDER}/rank_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "LLMCTL_RUN_ID": job.run_id,
        "LLMCTL_RUN_DIR": job.run_dir,
        "LLMCTL_ATTEMPT": str(attempt),
        "LLMCTL_ATTEMPT_DIR": folder,
        "LLMCTL_HOSTFILE": f"{folder}/hostfile",
        "LLMCTL_USER_DIR": os.path.realpath(f"{job.run_dir}/{OWN_FOLDER}"),
        "NNODES": str(job.nodes),
    }


def _has_started(job: JobSettings, end: CommandEnd, log: str) -> Optional[bool]:
    """True if job.sh has become the program of the run; None if unknown, as a COMMAND may be a bash script."""
    if not end.program:
        return None
    if end.program != _SHELL:
        return True
    if job.is_training:
        return False
    with suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return False if is_shells_end(end.status, file.read().decode(errors="replace")) else None
    return None


def guard(argv: Sequence[str], environ: Mapping[str, str], end_file: str) -> CommandEnd:
    """Run a command, and end the command when a file asks for that; returns its end.

    No signal ends this process itself.
    """
    signals = Signals()
    child = processes.start(argv, environ, dies_with_this=True)
    folder, name = os.path.split(end_file)
    is_asked = False
    while not os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
        names = _names(folder)
        if f"{name}.now" in names:
            processes.signal_group(child.pid, signal.SIGKILL)
            if "NODE_RANK" in environ:
                # Ranks of torchrun have groups of their own, and may be stopped.
                numbers = int(environ["LLMCTL_ATTEMPT"]), int(environ["NODE_RANK"])
                processes.kill_node(environ["LLMCTL_RUN_DIR"], *numbers)
        elif not is_asked and name in names:
            processes.signal_group(child.pid, signal.SIGTERM)
            is_asked = True
        signals.wait(_POLL_S)
    return _end_of(child)


def _outlive(argv: Sequence[str], environ: Mapping[str, str]) -> CommandEnd:
    """Run a command to its end; returns the end.

    Who signals this process signals its group, and so the command too: passing a signal on would deliver it twice.
    """
    for number in _SURVIVED:
        signal.signal(number, _nothing)
    child = subprocess.Popen(list(argv), env=dict(environ), preexec_fn=processes.die_with_parent())
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    return _end_of(child)


def _end_of(child: "subprocess.Popen[bytes]") -> CommandEnd:
    """End of a child that has ended and was not waited for: until then the kernel knows its name."""
    name = ""
    with suppress(OSError), open(f"/proc/{child.pid}/comm", errors="replace") as file:
        name = file.read().strip()
    return CommandEnd(child.wait(), name)


def _nothing(number: int, frame: Optional[FrameType]) -> None:
    """Do nothing. An ignored signal would be ignored by the command too, a handled one is not."""


def _names(folder: str) -> Sequence[str]:
    """List a folder: reading the directory makes a network file system refresh its cache."""
    with suppress(OSError):
        return os.listdir(folder)
    return ()


def _write_to(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)

"""Processes of an attempt on this machine, from /proc; see proc(5)."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from typing import Callable, Collection, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

_PR_SET_PDEATHSIG = 1
_KILL_ROUNDS = 3
_ROUND_S = 0.05
_TORCHRUN = b"TORCHELASTIC_RUN_ID"
_ATTACHED_SHELL = b"LLMCTL_INTERACTIVE"
SENDER = "LLMCTL_SENDS_NOTICE"
_OUTSIDE = frozenset((_ATTACHED_SHELL, SENDER.encode()))
"""Variables of processes that are not the run's: a shell that a person attached to it, and what sends a notice."""


def start(
    argv: Sequence[str], environ: Mapping[str, str], *, dies_with_this: bool = False
) -> "subprocess.Popen[bytes]":
    """Start a command in a new process group, without input.

    Args:
        argv: the command.
        environ: its variables.
        dies_with_this: the command is killed when this process is; see die_with_parent.

    Raises:
        OSError: the command cannot be started.
    """
    die = die_with_parent() if dies_with_this else _nothing

    def prepare() -> None:
        os.setpgid(0, 0)
        die()

    return subprocess.Popen(list(argv), env=dict(environ), stdin=subprocess.DEVNULL, preexec_fn=prepare)


def die_with_parent() -> Callable[[], None]:
    """A function that a new process calls before its program, to be killed when this process is.

    Call in the main thread: the kernel takes the end of the calling thread for that of the parent.
    A scheduler may end a job by killing the group of job.sh alone, as Grid Engine does without ENABLE_ADDGRP_KILL
    (sge_conf(5)). Nothing happens where the kernel has no PR_SET_PDEATHSIG (prctl(2)).
    """
    parent = os.getpid()
    try:
        # A Python that was built without libffi has none.
        import ctypes

        prctl = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return _nothing

    def die() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return die


def _nothing() -> None:
    pass


def exit_code(status: int) -> int:
    """The exit code of a shell for a status of ``Popen``: 128 + N for signal N."""
    return 128 - status if status < 0 else status


def signal_group(pid: int, number: int) -> None:
    """Signal a process group; a group that has ended is accepted."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def start_time(pid: int) -> Optional[int]:
    """Clock ticks from the boot to the start of a process; None if unknown."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def boot_id() -> Optional[str]:
    """The kernel's id of the current boot; None if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip() or None
    except OSError:
        return None


def kill_attempt(run_dir: str, attempt: int) -> None:
    """Kill all remaining processes of an attempt on this machine.

    Several rounds, since a process may start another meanwhile. Killed are the processes that carry the attempt in
    their environment (torchrun and mpirun put ranks into separate sessions), the descendants of this process, and the
    rest of this session if this process leads the session.
    """
    _kill_in_rounds(lambda: _members(run_dir, attempt))


def _kill_in_rounds(find: Callable[[], Collection[int]]) -> None:
    for _ in range(_KILL_ROUNDS):
        left = find()
        _kill(left)
        if not left:
            return
        time.sleep(_ROUND_S)


def _kill(pids: Collection[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_earlier_attempts(run_dir: str, attempt: int, patience_s: float) -> List[int]:
    """Kill the processes of a run's earlier attempts on this machine, and wait for their ends.

    Returns:
        Process ids that are left after this number of seconds: a process may wait for a file server.
    """
    deadline = time.monotonic() + patience_s
    while True:
        left = [pid for pid, variables in _environments() if _is_earlier(variables, run_dir, attempt) and _lives(pid)]
        _kill(left)
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(_ROUND_S)


def _is_earlier(variables: Mapping[bytes, bytes], run_dir: str, attempt: int) -> bool:
    number = variables.get(b"LLMCTL_ATTEMPT", b"")
    is_own = variables.get(b"LLMCTL_RUN_DIR") == os.fsencode(run_dir) and not _OUTSIDE & variables.keys()
    return is_own and number.isdigit() and int(number) < attempt


def _lives(pid: int) -> bool:
    fields = _stat(pid)
    return fields is not None and fields[0] not in "ZX"


def ask_ranks_to_end(run_dir: str, attempt: int, node: int) -> None:
    """Send SIGTERM to the processes of one node of an attempt.

    An agent of torchrun forwards the signal to its ranks.
    """
    for pid, variables in _environments():
        is_rank = _belongs(variables, run_dir, attempt) and variables.get(b"NODE_RANK") == str(node).encode()
        if is_rank and _TORCHRUN not in variables and _ATTACHED_SHELL not in variables:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)


def kill_node(run_dir: str, attempt: int, node: int) -> None:
    """Kill the processes of one node of an attempt on this machine, with the ranks of torchrun's agent.

    Launchers, such as a qrsh on this machine that leads to another node, and other nodes on this machine live on.
    """
    _kill_in_rounds(
        lambda: [
            pid
            for pid, variables in _environments()
            if _belongs(variables, run_dir, attempt)
            and variables.get(b"NODE_RANK") == str(node).encode()
            and not _OUTSIDE & variables.keys()
            and _lives(pid)
        ]
    )


def _members(run_dir: str, attempt: int) -> Set[int]:
    own = os.getpid()
    variables = dict(_environments())
    stats = {pid: fields for pid, fields in ((pid, _stat(pid)) for pid in variables) if fields is not None}
    living = {pid for pid, fields in stats.items() if fields[0] not in "ZX"}
    found = {pid for pid in living if _belongs(variables[pid], run_dir, attempt)}
    if os.getsid(0) == own:
        found |= {pid for pid in living if int(stats[pid][3]) == own}
    family = {own}
    while True:
        children = {pid for pid in stats if int(stats[pid][1]) in family} - family
        if not children:
            break
        family |= children
    found |= family & living
    return {pid for pid in found if not _OUTSIDE & variables[pid].keys()} - {own}


def _belongs(variables: Mapping[bytes, bytes], run_dir: str, attempt: int) -> bool:
    return (
        variables.get(b"LLMCTL_RUN_DIR") == os.fsencode(run_dir)
        and variables.get(b"LLMCTL_ATTEMPT") == str(attempt).encode()
    )


def _environments() -> Iterator[Tuple[int, Dict[bytes, bytes]]]:
    """Process id and environment of every process that this user may read."""
    names: List[str] = []
    with suppress(OSError):
        names = os.listdir("/proc")
    for name in names:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    entries = file.read().split(b"\0")
            except OSError:
                continue
            yield int(name), {key: value for key, _, value in (entry.partition(b"=") for entry in entries)}


def _stat(pid: int) -> Optional[List[str]]:
    """Fields of /proc/PID/stat after the name.

    The name is in parentheses and may contain any character.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None

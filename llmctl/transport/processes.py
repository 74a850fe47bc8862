"""What Linux's /proc says about the processes of this machine. Standard library only; the hands of the local transport.

A pid alone names nothing: it is reused after the process has gone and after a restart. A process is therefore named by
pid, start time and boot id, and signalled through a pidfd, which cannot slip to another process (pidfd_open(2)).
Fields of /proc/PID/stat: proc(5).
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
RUN_DIR_VARIABLE = "LLMCTL_RUN_DIR"
VISITOR_VARIABLE = "LLMCTL_INTERACTIVE"
"""Set by ``llmctl interactive``: a person's shell in a run's environment is no process of the run."""
RUN_VARIABLES = frozenset(
    {
        *(RUN_DIR_VARIABLE, VISITOR_VARIABLE, "LLMCTL_RUN_ID", "LLMCTL_ATTEMPT", "LLMCTL_HOSTFILE"),
        *("LLMCTL_ATTEMPT_DIR", "LLMCTL_ENVIRONMENT", "LLMCTL_MASTER_PORT", "LLMCTL_NODE", "LLMCTL_PYTHON"),
    }
)
"""What says to which run a process belongs. A job submitted from within a job or its shell must not inherit it."""


@dataclass(frozen=True)
class ProcessIdentity:
    """One process for all time: no other process has the same three values.

    Attributes:
        pid: process id.
        start_time: clock ticks from the machine's start to the process's; None if it could not be read.
        boot_id: the kernel's id of the machine's last start; None if it could not be read.
    """

    pid: int
    start_time: int | None
    boot_id: str | None


@dataclass(frozen=True)
class ProcessStat:
    """What matters of /proc/PID/stat: pid, parent, session, start time in clock ticks, and the state's letter."""

    pid: int
    parent: int
    session: int
    start_time: int
    state: str

    @property
    def is_alive(self) -> bool:
        """A zombie has ended: only its parent has not asked yet."""
        return self.state not in "ZX"


def boot_id() -> str | None:
    """The kernel's id of this start of the machine, or None where the system has none (other than Linux)."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip() or None
    except OSError:
        return None


def read_stat(pid: int) -> ProcessStat | None:
    """State of a process, or None if there is none with this pid."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command's name stands in parentheses and may itself hold spaces and parentheses: the last one closes it.
    fields = text.rpartition(")")[2].split()
    return ProcessStat(pid, parent=int(fields[1]), session=int(fields[3]), start_time=int(fields[19]), state=fields[0])


def identify(pid: int) -> ProcessIdentity | None:
    """Identity of a living process, or None if it has ended."""
    stat = read_stat(pid)
    if stat is None or not stat.is_alive:
        return None
    return ProcessIdentity(pid, stat.start_time, boot_id())


def is_alive(identity: ProcessIdentity) -> bool | None:
    """Whether exactly this process lives. None: it cannot be told (no /proc, or the identity lacks a part)."""
    here = boot_id()
    if here is None:
        return None
    if identity.boot_id is not None and identity.boot_id != here:
        return False
    stat = read_stat(identity.pid)
    if stat is None or not stat.is_alive:
        return False
    if identity.start_time is None or identity.boot_id is None:
        return None
    return stat.start_time == identity.start_time


@dataclass(frozen=True)
class ProcessReport:
    """What one machine says about processes: its name and start, and for each identity asked for ``is_alive``."""

    host: str
    boot_id: str | None
    alive: tuple[bool | None, ...]


def inspect(identities: Sequence[ProcessIdentity]) -> ProcessReport:
    """Which of these processes live on this machine."""
    return ProcessReport(socket.gethostname(), boot_id(), tuple(map(is_alive, identities)))


def send_signal(identity: ProcessIdentity, number: int) -> bool:
    """Signal exactly this process; False if it has ended or its pid now belongs to another.

    Raises:
        PermissionError: the process is another user's.
    """
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return False
    except (AttributeError, OSError):  # Python before 3.9, Linux before 5.3: checked, then signalled at once
        return is_alive(identity) is True and _kill(identity.pid, number)
    try:
        # The descriptor now holds the process that has the pid: only now is it certain whom the check is about.
        if is_alive(identity) is not True:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def _kill(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def processes_of_run(run_dir: str, leaders: Iterable[ProcessIdentity] = ()) -> list[ProcessIdentity]:
    """Every living process that a run has started on this machine, and no other.

    Taken are: the recorded leaders, as long as they are still the same processes, and their sessions; every process
    of this user that carries the run directory in its environment (torchrun puts its workers into sessions of their
    own); and the descendants of these, unless they carry another run's directory or are a person's interactive shell.

    Args:
        run_dir: the run directory, as LLMCTL_RUN_DIR states it.
        leaders: job.sh of the submissions that may still live.
    """
    here = boot_id()
    stats = {stat.pid: stat for stat in map(read_stat, _own_pids()) if stat is not None and stat.is_alive}
    kinds = {pid: _kind(pid, run_dir) for pid in stats}
    living = {leader.pid for leader in leaders if is_alive(leader)}
    found = {pid for pid, kind in kinds.items() if kind == "member"} | (living & stats.keys())
    found |= {pid for pid, stat in stats.items() if stat.session in living and kinds[pid] != "stranger"}
    grown = True
    while grown:
        children = {
            pid for pid, stat in stats.items() if stat.parent in found and pid not in found and kinds[pid] != "stranger"
        }
        found |= children
        grown = bool(children)
    found.discard(os.getpid())
    return [ProcessIdentity(pid, stats[pid].start_time, here) for pid in sorted(found)]


def end_run(
    run_dir: str, leaders: Sequence[ProcessIdentity], *, grace_s: float, kill_wait_s: float = 5.0
) -> list[ProcessIdentity]:
    """End every process of a run on this machine, and no other; returns what could not be ended.

    job.sh is asked first, and it lets the trainer save; where it has gone already, what remains of the run is asked.
    After the grace everything is killed, job.sh last: so it can still write down how the run ended.

    Args:
        run_dir: as for ``processes_of_run``.
        leaders: as for ``processes_of_run``.
        grace_s: seconds between SIGTERM and SIGKILL, cut short when nothing is left.
        kill_wait_s: seconds that the killed ones, and then job.sh, get to disappear (a process in an uninterruptible
            call does not).
    """
    seen: set[ProcessIdentity] = set()

    def remaining() -> list[ProcessIdentity]:
        # What once belonged stays known, also after its parent has gone and it could no longer be recognised.
        seen.update(processes_of_run(run_dir, leaders))
        return sorted((identity for identity in seen if is_alive(identity)), key=lambda identity: identity.pid)

    present = remaining()
    for identity in [one for one in present if one in leaders] or present:
        send_signal(identity, signal.SIGTERM)
    _wait_for_end(remaining, grace_s)
    _kill_all(lambda: [identity for identity in remaining() if identity not in leaders], kill_wait_s)
    _wait_for_end(remaining, kill_wait_s)
    return _kill_all(remaining, kill_wait_s)


def _wait_for_end(remaining: Callable[[], list[ProcessIdentity]], patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and remaining():
        time.sleep(0.1)


def _kill_all(remaining: Callable[[], list[ProcessIdentity]], patience_s: float) -> list[ProcessIdentity]:
    # Again and again: a process may start another between being seen and being killed.
    deadline = time.monotonic() + patience_s
    left = remaining()
    while left and time.monotonic() < deadline:
        for identity in left:
            send_signal(identity, signal.SIGKILL)
        time.sleep(0.05)
        left = remaining()
    return left


def _own_pids() -> list[int]:
    mine = os.getuid()
    pids = []
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            try:
                if entry.stat().st_uid == mine:
                    pids.append(int(entry.name))
            except OSError:
                continue
    return pids


def _kind(pid: int, run_dir: str) -> str:
    """``member`` of the run, ``stranger`` to it, or ``plain``: its environment does not say."""
    try:
        variables = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return "plain"
    if any(variable.startswith(VISITOR_VARIABLE.encode() + b"=") for variable in variables):
        return "stranger"
    prefix = RUN_DIR_VARIABLE.encode() + b"="
    stated = next((variable[len(prefix) :] for variable in variables if variable.startswith(prefix)), None)
    if stated is None:
        return "plain"
    return "member" if os.fsencode(run_dir) == stated else "stranger"

"""Processes of this machine, by Linux's /proc. Standard library only; the local transport calls these functions.

A pid alone does not identify a process: the kernel reuses pids, also after a restart. A process is therefore identified
by pid, start time and boot id, and signalled through a pidfd, which cannot refer to another process (pidfd_open(2)).
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
INTERACTIVE_VARIABLE = "LLMCTL_INTERACTIVE"
"""Set by ``llmctl interactive``: an interactive shell in a run's environment is not a process of the run."""
RUN_VARIABLES = frozenset(
    {
        *(RUN_DIR_VARIABLE, INTERACTIVE_VARIABLE, "LLMCTL_RUN_ID", "LLMCTL_ATTEMPT", "LLMCTL_HOSTFILE"),
        *("LLMCTL_ATTEMPT_DIR", "LLMCTL_ENVIRONMENT", "LLMCTL_MASTER_PORT", "LLMCTL_NODE", "LLMCTL_PYTHON"),
    }
)
"""Variables that tell a process's run. A job submitted from within a job or its shell must not inherit them."""


@dataclass(frozen=True)
class ProcessIdentity:
    """Identity of one process, unique across reboots and pid reuse.

    Attributes:
        pid: process id.
        start_time: clock ticks from the machine's start to the process's; None if unreadable.
        boot_id: the kernel's id of the machine's last start; None if unreadable.
    """

    pid: int
    start_time: int | None
    boot_id: str | None


@dataclass(frozen=True)
class ProcessStat:
    """Fields of /proc/PID/stat: pid, parent, session, start time in clock ticks, and the state's letter."""

    pid: int
    parent: int
    session: int
    start_time: int
    state: str

    @property
    def is_alive(self) -> bool:
        """True unless the process has ended; a zombie has ended, and its parent has not waited for it yet."""
        return self.state not in "ZX"


def boot_id() -> str | None:
    """Kernel's id of this start of the machine; None on systems other than Linux."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip() or None
    except OSError:
        return None


def read_stat(pid: int) -> ProcessStat | None:
    """State of a process, or None if no process has this pid."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command's name is in parentheses and may itself hold spaces and parentheses. The last ")" ends the name.
    fields = text.rpartition(")")[2].split()
    return ProcessStat(pid, parent=int(fields[1]), session=int(fields[3]), start_time=int(fields[19]), state=fields[0])


def identify(pid: int) -> ProcessIdentity | None:
    """Identity of a living process, or None if it has ended."""
    stat = read_stat(pid)
    if stat is None or not stat.is_alive:
        return None
    return ProcessIdentity(pid, stat.start_time, boot_id())


def is_alive(identity: ProcessIdentity) -> bool | None:
    """True if exactly this process lives; None if unknown (no /proc, or the identity lacks a part)."""
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
    """Host name and boot id of a machine, and ``is_alive`` for each requested identity."""

    host: str
    boot_id: str | None
    alive: tuple[bool | None, ...]


def inspect(identities: Sequence[ProcessIdentity]) -> ProcessReport:
    """Report which of these processes live on this machine."""
    return ProcessReport(socket.gethostname(), boot_id(), tuple(map(is_alive, identities)))


def send_signal(identity: ProcessIdentity, number: int) -> bool:
    """Signal exactly this process; False if the process has ended, also if its pid was reused.

    Raises:
        PermissionError: the process is another user's.
    """
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return False
    except (AttributeError, OSError):  # Python before 3.9, Linux before 5.3: check, then signal at once
        return is_alive(identity) is True and _kill(identity.pid, number)
    try:
        # The descriptor now holds the process that has the pid. Only now does the check surely concern that process.
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

    These are: the recorded leaders, as long as they are still the same processes, and their sessions; every process
    of this user that has the run directory in its environment (torchrun starts its workers in sessions of their own);
    and the descendants of all these, except processes with another run's directory and interactive shells.

    Args:
        run_dir: the run directory, as LLMCTL_RUN_DIR states it.
        leaders: job.sh of the submissions that may still live.
    """
    here = boot_id()
    stats = {stat.pid: stat for stat in map(read_stat, _own_pids()) if stat is not None and stat.is_alive}
    kinds = {pid: _kind(pid, run_dir) for pid in stats}
    living = {leader.pid for leader in leaders if is_alive(leader)}
    found = {pid for pid, kind in kinds.items() if kind == "member"} | (living & stats.keys())
    found |= {pid for pid, stat in stats.items() if stat.session in living and kinds[pid] != "foreign"}
    grown = True
    while grown:
        children = {
            pid for pid, stat in stats.items() if stat.parent in found and pid not in found and kinds[pid] != "foreign"
        }
        found |= children
        grown = bool(children)
    found.discard(os.getpid())
    return [ProcessIdentity(pid, stats[pid].start_time, here) for pid in sorted(found)]


def end_run(
    run_dir: str, leaders: Sequence[ProcessIdentity], *, grace_s: float, kill_wait_s: float = 5.0
) -> list[ProcessIdentity]:
    """End every process of a run on this machine, and no other; return the processes that remain.

    job.sh gets SIGTERM first and lets the trainer save. If job.sh has ended already, the run's remaining processes get
    SIGTERM. After the grace period all are killed, job.sh last, so that job.sh can still record how the run ended.

    Args:
        run_dir: as for ``processes_of_run``.
        leaders: as for ``processes_of_run``.
        grace_s: seconds between SIGTERM and SIGKILL, less if all processes end earlier.
        kill_wait_s: seconds to wait for the killed processes, and then for job.sh, to disappear (a process in an
            uninterruptible call does not).
    """
    seen: set[ProcessIdentity] = set()

    def remaining() -> list[ProcessIdentity]:
        # A process of the run stays known, also if its parent ends and the process could no longer be recognised.
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
    # Repeatedly: a process may start another process between the listing and the signal.
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
    """``member`` of the run, ``foreign`` to the run, or ``plain``: its environment names no run."""
    try:
        variables = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return "plain"
    if any(variable.startswith(INTERACTIVE_VARIABLE.encode() + b"=") for variable in variables):
        return "foreign"
    prefix = RUN_DIR_VARIABLE.encode() + b"="
    stated = next((variable[len(prefix) :] for variable in variables if variable.startswith(prefix)), None)
    if stated is None:
        return "plain"
    return "member" if os.fsencode(run_dir) == stated else "foreign"

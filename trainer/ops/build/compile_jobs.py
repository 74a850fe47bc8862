"""Compilers side by side: as many as fit the machine, none left behind. Torch-free."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trainer.ops.build.build_settings import BuildError

_ASK_TIMEOUT_S = 60.0
_BYTES_PER_JOB = 2 << 30
"""What one compiler may need of memory."""
_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")


def ask_compiler(command: Sequence[str]) -> str:
    """What a compiler says of itself on standard output; nothing if it cannot be started, fails, or takes a minute."""
    # OSError also where /tmp is full.
    with suppress(OSError, subprocess.TimeoutExpired), tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            code = process.wait(_ASK_TIMEOUT_S)
        finally:
            if process.poll() is None:
                # With all that it has started: it may be a script.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said.seek(0)
        return said.read().decode(errors="replace") if code == 0 else ""
    return ""


@dataclass(frozen=True)
class CompileJob:
    """One command, and the file that takes what it says."""

    command: tuple[str, ...]
    log: Path


_Job = TypeVar("_Job", bound=CompileJob)


def run_compilers(
    jobs: Sequence[_Job],
    at_once: int,
    deadline: float,
    progress: Callable[[int, int], None],
    finished: Callable[[_Job], None] | None = None,
) -> None:
    """Run all of ``jobs``, and when one fails, or this is interrupted, kill the rest.

    Args:
        jobs: in the order in which they are started.
        at_once: how many run at a time.
        deadline: by time.monotonic().
        progress: is told how many are done, and of how many.
        finished: is given each that is done.

    Raises:
        BuildError: one failed, or the deadline has passed.
    """
    crew, pool = _Crew(), ThreadPoolExecutor(at_once)
    done = 0
    try:
        working = {pool.submit(crew.run, job): job for job in jobs}
        pending = set(working)
        while pending:
            ended, pending = wait(pending, max(0.0, deadline - time.monotonic()), FIRST_COMPLETED)
            if not ended:
                raise BuildError(f"the compiler was not done in time, with {done} of {len(jobs)} files compiled")
            for future in ended:
                future.result()
                done += 1
                if finished is not None:
                    finished(working[future])
                progress(done, len(jobs))
    finally:
        crew.end()
        pool.shutdown(cancel_futures=True)


class _Crew:
    """Starts compilers in threads, where no signal can come between a start and the note of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._has_ended = False

    def run(self, job: CompileJob) -> None:
        """Run one job to its end."""
        with self._lock:
            if self._has_ended:
                return
            process = _start(job)
            self._running.add(process)
        status = process.wait()
        with self._lock:
            self._running.discard(process)
            if status and not self._has_ended:
                raise _failure(job, status)

    def end(self) -> None:
        """Kill what runs, with its children; nothing is started any more."""
        with self._lock:
            self._has_ended = True
            for process in self._running:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _start(job: CompileJob) -> subprocess.Popen[bytes]:
    with job.log.open("wb") as log:
        try:
            # A session of its own: the compiler's own children end with it, and Ctrl-C is ours to act on.
            return subprocess.Popen(
                job.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise BuildError(f"{job.command[0]} cannot be started: {error.strerror}") from error


def _failure(job: CompileJob, status: int) -> BuildError:
    said = job.log.read_text(errors="replace").strip()
    errors = [line.strip() for line in said.splitlines() if "error" in line.lower()]
    how = f"was killed by signal {-status}, for want of memory perhaps" if status < 0 else f"failed ({status})"
    first = f": {errors[0]}" if errors else ""
    return BuildError(f"{job.command[0]} {how}{first}", f"{' '.join(job.command)}\n{said}")


def jobs_that_fit() -> int:
    """Compilers that cores and free memory have room for; at least one."""
    return max(1, min(len(os.sched_getaffinity(0)), _free_memory() // _BYTES_PER_JOB))


def _free_memory() -> int:
    """Bytes that this process may still take, by the machine and by its own control groups."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    with suppress(OSError, ValueError):
        for line in _OWN_GROUP.read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            if controllers == "":
                free = min(free, _left(_CGROUP / own.lstrip("/"), "memory.max", "memory.current"))
            elif "memory" in controllers.split(","):
                group = _CGROUP / "memory" / own.lstrip("/")
                free = min(free, _left(group, "memory.limit_in_bytes", "memory.usage_in_bytes"))
    return free


def _left(group: Path, limit: str, use: str) -> int:
    """What a control group, in either version of cgroups(7), and those around it have left."""
    left = sys.maxsize
    # A scheduler limits the job; the step or the slice inside of it may be without a limit of its own.
    for level in (group, *group.parents):
        with suppress(OSError, ValueError):
            left = min(left, _number(level / limit) - _number(level / use))
    return left


def _number(path: Path) -> int:
    return int(path.read_text())

"""Parallel compiler processes, limited by cores and memory and always cleaned up. Torch-free."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TypeVar

from trainer.ops.build.build_settings import BuildError

_ASK_TIMEOUT_S = 60.0
_LOOK_S = 0.5
"""Time between two looks at signals and at is_cancelled."""
_BYTES_PER_JOB = 2 << 30
"""Memory that one compiler may need."""
_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")


def ask_compiler(command: Sequence[str]) -> str:
    """Standard output of a compiler query; empty on a failure or timeout."""
    # OSError also if /tmp is full.
    with suppress(OSError, subprocess.TimeoutExpired), tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            code = process.wait(_ASK_TIMEOUT_S)
        finally:
            if process.poll() is None:
                # Kill its children too: the compiler may be a script.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return output.read().decode(errors="replace") if code == 0 else ""
    return ""


@dataclass(frozen=True)
class CompileJob:
    """One command, and the file for its output."""

    command: tuple[str, ...]
    log: Path


_Job = TypeVar("_Job", bound=CompileJob)


def run_compilers(
    jobs: Sequence[_Job],
    at_once: int,
    deadline: float,
    finished: Callable[[_Job], None] = lambda _: None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Run all of ``jobs``. Kill the rest on a failure or an interrupt.

    The compilers inherit the priority of the calling thread.

    Args:
        jobs: jobs in the order of their start.
        at_once: number of jobs that run at a time.
        deadline: deadline by time.monotonic().
        finished: receives each finished job.
        is_cancelled: asked about twice per second; True ends the build.

    Raises:
        BuildError: a job failed, the deadline has passed, or the build is cancelled.
    """
    processes, pool = _Processes(), ThreadPoolExecutor(at_once)
    done = 0
    with _signals_held_back() as handle_signals:
        try:
            working = {pool.submit(processes.run, job): job for job in jobs}
            pending = set(working)
            while pending:
                handle_signals()
                if is_cancelled():
                    raise BuildError(f"the build was cancelled: {done} of {len(jobs)} files are compiled")
                left = deadline - time.monotonic()
                ended, pending = wait(pending, min(_LOOK_S, max(0.0, left)), FIRST_COMPLETED)
                if not ended and left <= 0:
                    raise BuildError(f"the compiler did not finish in time: {done} of {len(jobs)} files are compiled")
                for future in ended:
                    future.result()
                    done += 1
                    finished(working[future])
        finally:
            processes.end()
            pool.shutdown(cancel_futures=True)


@contextmanager
def _signals_held_back() -> Iterator[Callable[[], None]]:
    """Hold the signals that end a program back, and yield a function that runs their handlers.

    Threads and futures take locks in Python code. A handler that raises there may leave a lock taken, and a worker
    that needs it never ends.
    """
    handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
    held: list[int] = []

    def handle_signals() -> None:
        while held:
            number = held.pop(0)
            handlers[number](number, None)

    try:
        # Python runs handlers in the main thread alone.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                handler = signal.getsignal(number)
                if callable(handler):
                    handlers[number] = handler
                    signal.signal(number, lambda sent, _: held.append(sent))
        yield handle_signals
    finally:
        for changed, before in handlers.items():
            signal.signal(changed, before)
    handle_signals()


class _Processes:
    """Compiler processes, started in threads.

    In a thread no signal can arrive between the start of a process and its record.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._has_ended = False

    def run(self, job: CompileJob) -> None:
        """Run one job to completion."""
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
        """Kill all running compilers with their children, and start no more."""
        with self._lock:
            self._has_ended = True
            for process in self._running:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _start(job: CompileJob) -> subprocess.Popen[bytes]:
    with job.log.open("wb") as log:
        try:
            # In a new session: killpg reaches the compiler's children, and Ctrl-C reaches only this process.
            process = subprocess.Popen(
                job.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise BuildError(f"{job.command[0]} cannot be started: {error.strerror}") from error
    niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    if niceness > 0:
        # Between two sessions the kernel compares the niceness of their groups alone, where it groups by session:
        # sched(7), "The autogroup feature".
        with suppress(OSError):
            Path(f"/proc/{process.pid}/autogroup").write_text(str(niceness))
    return process


def _failure(job: CompileJob, status: int) -> BuildError:
    output = job.log.read_text(errors="replace").strip()
    errors = [line.strip() for line in output.splitlines() if "error" in line.lower()]
    how = f"was killed by signal {-status}, perhaps for lack of memory" if status < 0 else f"failed ({status})"
    first = f": {errors[0]}" if errors else ""
    return BuildError(f"{job.command[0]} {how}{first}", f"{' '.join(job.command)}\n{output}")


def jobs_that_fit() -> int:
    """Number of compilers that cores and free memory allow; at least 1."""
    return max(1, min(len(os.sched_getaffinity(0)), free_memory() // _BYTES_PER_JOB))


def free_memory() -> int:
    """Bytes available to this process, by the machine and by its control groups."""
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
    """Bytes left in a control group and its parents, for both versions of cgroups(7)."""
    left = sys.maxsize
    # A scheduler limits the job's group; the group of a step or slice inside may have no limit.
    for level in (group, *group.parents):
        with suppress(OSError, ValueError):
            left = min(left, _number(level / limit) - _number(level / use))
    return left


def _number(path: Path) -> int:
    return int(path.read_text())

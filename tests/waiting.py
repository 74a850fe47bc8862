"""Bounded waits for an event.

A wait ends with its event. The bound only ends a hang: it is the same for every wait, and far above the time that a
loaded machine needs, so that no test depends on how long something takes.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

HANG_S = 500.0
"""Seconds after which a wait counts as a hang. Below pytest's own limit, so that a wait can name its event."""
Value = TypeVar("Value")


def wait_for(
    condition: Callable[[], Value], what: str | Callable[[], object], step_s: float = 0.05, longest_step_s: float = 0.0
) -> Value:
    """Call a condition until its value is true, and return this value.

    Args:
        condition: called every ``step_s`` seconds.
        what: name of the event, or a function that returns the present value; for the message of a failed wait.
        step_s: seconds between two calls.
        longest_step_s: seconds to which step_s grows, by half after each call. For conditions that cost much.

    Raises:
        AssertionError: the event has not come in HANG_S seconds.
    """
    end = time.monotonic() + HANG_S
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {HANG_S:.0f} s for {what if isinstance(what, str) else what()}"
        time.sleep(step_s)
        step_s = max(step_s, min(1.5 * step_s, longest_step_s))
    return value


def children_of(pid: int) -> list[int]:
    """Process ids of the living descendants of a process."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (fields := _stat(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    found = [pid]
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return found[1:]


def wait_for_ends(pids: Sequence[int]) -> None:
    """Wait until processes have ended; a zombie has. Those that have not are killed when the wait fails."""
    try:
        wait_for(lambda: not [*filter(_lives, pids)], f"the ends of processes {pids}")
    finally:
        for pid in filter(_lives, pids):
            os.kill(pid, signal.SIGKILL)


def _lives(pid: int) -> bool:
    return _stat(pid)[:1] not in ([], ["Z"], ["X"])


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty without such a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []

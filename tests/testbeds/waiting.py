"""Bounded waits for a scheduler or a host."""

import time
from collections.abc import Callable

PATIENCE = 3
"""Factor on the waits of an idle machine, because other tests compute at the same time."""


def deadline(patience_s: float) -> float:
    """Monotonic time of the end of a wait that takes at most ``patience_s`` seconds on an idle machine."""
    return time.monotonic() + PATIENCE * patience_s


def wait_for(condition: Callable[[], bool], patience_s: float, what: str | Callable[[], str]) -> None:
    """Wait for a condition that takes at most ``patience_s`` seconds on an idle machine; fail with its name.

    A callable name is called at the end of the wait, and returns the actual value.
    """
    end = deadline(patience_s)
    while not condition():
        if time.monotonic() >= end:
            raise AssertionError(f"waited {PATIENCE * patience_s} s for {what if isinstance(what, str) else what()}")
        time.sleep(0.05)

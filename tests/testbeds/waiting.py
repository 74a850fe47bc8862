"""Waiting, within bounds, for what a scheduler or a host is to do."""

import time
from collections.abc import Callable

PATIENCE = 3
"""How many times longer than on an idle machine: other tests compute at the same time."""


def deadline(patience_s: float) -> float:
    """The monotonic time until which to wait for what takes at most ``patience_s`` seconds on an idle machine."""
    return time.monotonic() + PATIENCE * patience_s


def wait_for(condition: Callable[[], bool], patience_s: float, what: str | Callable[[], str]) -> None:
    """Wait until something holds that takes ``patience_s`` seconds at most on an idle machine; fail with its name.

    A name that is called is asked at the end of the wait, for what was there instead.
    """
    end = deadline(patience_s)
    while not condition():
        if time.monotonic() >= end:
            raise AssertionError(f"waited {PATIENCE * patience_s} s for {what if isinstance(what, str) else what()}")
        time.sleep(0.05)

"""Bounded waits for an event.

A wait ends with its event. The bound only ends a hang: it is the same for every wait, and far above the time that a
loaded machine needs, so that no test depends on how long something takes.
"""

import time
from collections.abc import Callable
from typing import TypeVar

HANG_S = 500.0
"""Seconds after which a wait counts as a hang. Below pytest's own limit, so that a wait can name its event."""
Value = TypeVar("Value")


def wait_for(condition: Callable[[], Value], what: str | Callable[[], object], step_s: float = 0.05) -> Value:
    """Call a condition until its value is true, and return this value.

    Args:
        condition: called every ``step_s`` seconds.
        what: name of the event, or a function that returns the present value; for the message of a failed wait.
        step_s: seconds between two calls.

    Raises:
        AssertionError: the event has not come in HANG_S seconds.
    """
    end = time.monotonic() + HANG_S
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {HANG_S:.0f} s for {what if isinstance(what, str) else what()}"
        time.sleep(step_s)
    return value

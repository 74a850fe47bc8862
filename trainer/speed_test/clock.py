"""Time of an operation on a device: median over repetitions, after a warm-up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

_WARM_UP = 3
"""First calls open connections, choose kernels and fill caches."""
_FEWEST, _MOST = 3, 20
"""Repetitions of a measurement."""
_BATCH_S, _LARGEST_BATCH = 2e-3, 64
"""A repetition is so long, or so many calls: its start and the clock's own steps take microseconds."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, and the repetitions of which this is the median."""

    seconds: float
    repetitions: int


def alone(seconds: float) -> float:
    """The time of a rank that measures by itself, see Clock.time."""
    return seconds


class Clock:
    """The clock of one device."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        """Take about ``seconds`` for the repetitions of one measurement on ``device``."""
        self.device = device
        self._seconds = seconds

    def time(self, call: Callable[[], object], agree: Callable[[float], float] = alone) -> Timing:
        """Time ``call``.

        Args:
            call: starts the operation on the current stream.
            agree: the largest of the seconds of all ranks that take part; collective, so that they repeat alike.
        """
        for _ in range(_WARM_UP):
            call()
        self.wait()
        once = max(agree(self._batch(call, 1)), 1e-7)
        calls = min(max(math.ceil(_BATCH_S / once), 1), _LARGEST_BATCH)
        repetitions = min(max(int(self._seconds / (once * calls)), _FEWEST), _MOST)
        times = [self._batch(call, calls) for _ in range(repetitions)]
        return Timing(agree(median(times)), repetitions)

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _batch(self, call: Callable[[], object], calls: int) -> float:
        """Seconds of each of some calls in a row."""
        if self.device.type != "cuda":
            began = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - began) / calls
        # The device's own clock: the host's would count the way there and back.
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / calls

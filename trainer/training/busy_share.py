"""Share of time in which a rank does not wait for other ranks, from samples of its main thread. Costs microseconds.

All ranks take the same time for a step, because they wait for the slowest one. So a rank that needs more time than
others of the same stage has a greater share of its own work. A wait for a device tells nothing about other ranks, so
there are shares on CPUs alone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING

from typing_extensions import Self

from trainer.training.collective_counts import CollectiveCounts

if TYPE_CHECKING:
    import torch

    from trainer.process.heartbeat import Heartbeat

SAMPLE_S = 0.05
WINDOW_S = 30.0
WINDOWS = 4
"""Newest windows that are kept: noise that lasts one or two of them names nobody."""

_OWN_WORK = ("data", "forward and backward", "optimizer", "agreement")
"""Phases of a step (trainer/training/loop.py). In the others rank 0 alone may have work, for which the rest waits."""


def busy_shares(heartbeat: Heartbeat, device: torch.device) -> AbstractContextManager[object]:
    """Tell the heartbeat of this rank's shares within the context; on a CPU alone."""
    if device.type != "cpu":
        return nullcontext()
    counts = CollectiveCounts()
    return BusyShare(lambda: heartbeat.phase not in _OWN_WORK or counts.is_inside, heartbeat.note_busy)


class BusyShare:
    """Samples the main thread from a thread of its own, as a context manager."""

    def __init__(
        self,
        is_waiting: Callable[[], bool],
        note: Callable[[tuple[float, ...]], None],
        *,
        window_s: float = WINDOW_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Sample ``is_waiting``, and ``note`` the shares of the newest windows, the oldest first, as each one ends."""
        self._is_waiting, self._note, self._window_s, self._clock = is_waiting, note, window_s, clock
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="busy share", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()

    def _run(self) -> None:
        shares: deque[float] = deque(maxlen=WINDOWS)
        last = self._clock()
        while not self._end.is_set():
            waited = total = 0.0
            while total < self._window_s:
                if self._end.wait(SAMPLE_S):
                    return
                # A sample stands for the time since the last one, which is longer if the process or its interpreter
                # was held up.
                is_waiting, now = self._is_waiting(), self._clock()
                waited += (now - last) * is_waiting
                total += now - last
                last = now
            shares.append(round(1 - waited / total, 4))
            self._note(tuple(shares))

"""Copies of the state in host memory that a thread makes while training goes on to the next change of the state.

Forward and backward passes only read weights, and no optimizer state, so that copies made beside them hold the state
between two steps. DataStates-LLM (https://doi.org/10.1145/3625549.3658685) does the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Lock

import torch
from torch import Tensor

from trainer.optimizer.split_master import Master, SplitMaster


class Snapshot:
    """The copies of one save. On a GPU they come after all that was launched before."""

    def __init__(self, pairs: Sequence[tuple[Master, Tensor]], stream: torch.cuda.Stream | None) -> None:
        """Copy nothing yet.

        Args:
            pairs: a live tensor, and its place in host memory.
            stream: on which a GPU copies; None: the state is that of a CPU.
        """
        self._pairs, self._stream, self._lock = tuple(pairs), stream, Lock()
        self._ready = None if stream is None else torch.cuda.current_stream(stream.device).record_event()
        self._ended: float | None = None
        self._asked: float | None = None

    def make(self) -> None:
        """Make the copies, or wait for the thread that makes them. Any thread may call it, and any number of times."""
        with self._lock:
            if self._ended is None:
                self._copy()
                self._pairs = ()
                self._ended = time.perf_counter()

    def before_change(self) -> None:
        """``make``, for the training: the state may change on return, and the time counts as ``waited_s``."""
        self._asked = time.perf_counter()
        self.make()

    @property
    def waited_s(self) -> float:
        """Time in seconds for which the training waited for the copies, which are made."""
        if self._asked is None or self._ended is None:
            return 0.0
        return max(0.0, self._ended - self._asked)

    @torch.no_grad()
    def _copy(self) -> None:
        if self._stream is None or self._ready is None:
            self._copy_all()
            return
        self._stream.wait_event(self._ready)
        with torch.cuda.stream(self._stream):
            self._copy_all()
        self._stream.synchronize()

    def _copy_all(self) -> None:
        for tensor, place in self._pairs:
            if isinstance(tensor, SplitMaster):
                tensor.copy_to(place)
            else:
                place.copy_(tensor, non_blocking=True)

"""Batches that are ready when they are asked for: read ahead in the background, within bounds."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from trainer.data.loading.loader_sharing import BatchRole, Windows
from trainer.data.samples.batches import MicroBatch, Split, TrainData
from trainer.data.watchdog import TOLD_AFTER_S, SilenceWatch

T = TypeVar("T")
DEPTH = 2
"""Global batches of this replica that are read ahead."""
_KEPT_BYTES = 256 << 20


class ReadAhead(Generic[T]):
    """Calls ``read`` for the global batches that come next, in one thread, while nobody waits for them yet."""

    def __init__(
        self, read: Callable[[Split, int], T], step: int, limits: Mapping[Split, int], depth: int = DEPTH
    ) -> None:
        """Nothing is read before the first is asked for.

        Args:
            read: makes what belongs to a split and a number of consumed samples.
            step: samples of a global batch.
            limits: of each split, the sample from which on nothing will be asked for.
            depth: how many are held ready, beside the one that is in use; 0: each is read when it is asked for, by who
                asks.
        """
        self._read = read
        self._step = step
        self._limits = limits
        self._depth = depth
        self.thread_id = 0
        """Of the thread that has read last, as the system counts; 0: none has."""
        self._waiting: dict[tuple[Split, int], Future[T]] = {}
        self._thread = ThreadPoolExecutor(1, "read-ahead") if depth else None

    def get(self, split: Split, consumed_samples: int) -> T:
        """What was read, after waiting for it if need be.

        Raises:
            Exception: what reading it raised, in whichever thread.
        """
        if self._thread is None:
            return self._do_read(split, consumed_samples)
        found = self._waiting.pop((split, consumed_samples), None)
        if found is None:
            # Out of turn: what was read ahead of the old place is of no use.
            for key in [key for key in self._waiting if key[0] == split]:
                self._waiting.pop(key).cancel()
            found = self._thread.submit(self._do_read, split, consumed_samples)
        for following in range(1, self._depth + 1):
            key = (split, consumed_samples + following * self._step)
            if key[1] < self._limits.get(split, 0) and key not in self._waiting:
                self._waiting[key] = self._thread.submit(self._do_read, *key)
        return found.result()

    def _do_read(self, split: Split, consumed_samples: int) -> T:
        self.thread_id = threading.get_native_id()
        return self._read(split, consumed_samples)

    def close(self) -> None:
        """Read no more; waits for what is being read."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._waiting.clear()


@dataclass(frozen=True)
class _Reader:
    """The thread that reads what is waited for. Nothing ends one that hangs but the end of its process."""

    batches: ReadAhead[Any]
    consumed_samples: int

    name = "the thread that reads data"

    @property
    def proc(self) -> Path:
        """See silence.Worker."""
        return Path(f"/proc/self/task/{self.batches.thread_id}")

    @property
    def work(self) -> str:
        """See silence.Worker."""
        return f"reads the batch at sample {self.consumed_samples:,}"

    def give_up(self, reason: str) -> None:
        """See silence.Worker."""


class BatchLoader:
    """This rank's micro-batches of each global batch, on the CPU. The same calls in the same order on all ranks."""

    def __init__(
        self,
        data: TrainData,
        role: BatchRole,
        limits: Mapping[Split, int],
        depth: int = DEPTH,
        *,
        pinned: bool = False,
        kept: Collection[Split] = ("valid", "test"),
        told_s: float = TOLD_AFTER_S,
    ) -> None:
        """Read from ``data``, which is closed with this.

        Args:
            data: the samples.
            role: whether this rank reads, gets what another one reads, or needs nothing.
            limits: of each split, the sample from which on nothing will be asked for.
            depth: global batches to read ahead; 0: none, and no thread.
            pinned: put them into memory that a GPU copies from while it computes.
            kept: splits of a stream that are kept in memory when they were read once, as far as they are small.
            told_s: that reading may hang, as on a server of files that is gone, before a line says so.
        """
        self._data = data
        self._role = role
        self._depth = depth
        self._pinned = pinned
        self._kept_splits = frozenset(kept)
        self._kept: dict[tuple[Split, int], Windows] = {}
        self._kept_bytes = 0
        self._watch = SilenceWatch(math.inf, _warn, told_s)
        self._batches = ReadAhead(self._read_batches, data.step, limits, depth)
        self._windows = ReadAhead(self._read_windows, data.step, limits, depth if data.stream is not None else 0)

    @property
    def masks_loss(self) -> bool:
        """Whether some labels do not count, so that the tokens of a global batch have to be counted."""
        return self._data.masks_loss

    def has(self, split: Split) -> bool:
        """Whether there is anything to read in ``split``."""
        return self._data.has(split)

    def micro_batches(self, split: Split, consumed_samples: int) -> list[MicroBatch]:
        """This replica's micro-batches of the global batch that starts at ``consumed_samples``.

        On a rank that needs none they have the right shapes, and tokens that mean nothing. Collective over the ranks of
        a replica that share what one of them reads.

        Raises:
            DataError: the data cannot be read, or holds a token outside the vocabulary.
        """
        if not self._role.needs:
            return self._data.placeholders()
        if self._data.stream is None:
            return self._watched(self._batches, split, consumed_samples)
        windows = self._watched(self._windows, split, consumed_samples) if self._role.reads else None
        shared = self._role.share(windows, self._data.windows_shape)
        return self._finished(self._data.of_windows(shared))

    def state(self, consumed_samples: int) -> dict[str, Any] | None:
        """What a checkpoint needs to know of the place in the data besides ``consumed_samples``; None: nothing."""
        return self._data.state(consumed_samples) if self._role.reads else None

    def close(self) -> None:
        """Read no more, and end what reads: no thread and no process is left."""
        # Their end is what a thread that waits for processes waits for.
        if self._data.stream is not None:
            self._data.stream.close()
        self._batches.close()
        self._windows.close()
        self._watch.close()

    def _watched(self, batches: ReadAhead[T], split: Split, consumed_samples: int) -> T:
        if self._data.stream is not None and self._depth:
            # The thread waits for processes, which the stream watches itself.
            return batches.get(split, consumed_samples)
        self._watch.begin(_Reader(batches, consumed_samples))
        try:
            return batches.get(split, consumed_samples)
        finally:
            self._watch.begin(None)

    def _read_batches(self, split: Split, consumed_samples: int) -> list[MicroBatch]:
        return self._finished(self._data.micro_batches(split, consumed_samples))

    def _read_windows(self, split: Split, consumed_samples: int) -> Windows:
        key = (split, consumed_samples)
        if key in self._kept:
            return self._kept[key]
        windows = self._data.windows(split, consumed_samples)
        if split in self._kept_splits and self._kept_bytes + windows.nbytes <= _KEPT_BYTES:
            self._kept[key] = windows
            self._kept_bytes += windows.nbytes
        return windows

    def _finished(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        return [batch.pinned() for batch in batches] if self._pinned else batches


def _warn(line: str) -> None:
    # Each rank has a log.
    print(f"trainer: {line}", file=sys.stderr, flush=True)

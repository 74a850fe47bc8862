"""Loader that prefetches batches in the background, within bounds."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from trainer.data.loading.loader_sharing import BatchRole, Windows
from trainer.data.samples.batches import Split, TrainData
from trainer.data.samples.micro_batch import MicroBatch
from trainer.data.watchdog import REPORT_AFTER_S, Watchdog

T = TypeVar("T")
DEPTH = 2
"""Number of prefetched global batches."""
_KEPT_BYTES = 256 << 20


class ReadAhead(Generic[T]):
    """Prefetches the next global batches by calling ``read`` in one thread."""

    def __init__(
        self,
        read: Callable[[Split, int], T],
        batch_size: Callable[[Split, int], int],
        limits: Mapping[Split, int],
        depth: int = DEPTH,
    ) -> None:
        """Prepare to read; nothing is read before the first ``get``.

        Args:
            read: function from a split and a number of consumed samples to the batch.
            batch_size: function from the same to the samples of the batch.
            limits: end of each split: the first sample that is never requested.
            depth: number of prefetched batches besides the current one; 0: read each batch on demand in the caller's
                thread.
        """
        self._read = read
        self._batch_size = batch_size
        self._limits = limits
        self._depth = depth
        self.thread_id = 0
        """System id of the thread that read last; 0: no read yet."""
        self._waiting: dict[tuple[Split, int], Future[T]] = {}
        self._thread = ThreadPoolExecutor(1, "read-ahead") if depth else None

    def get(self, split: Split, consumed_samples: int) -> T:
        """Return the batch, waiting for it if necessary.

        Raises:
            Exception: any exception of ``read``, from whichever thread.
        """
        if self._thread is None:
            return self._do_read(split, consumed_samples)
        found = self._waiting.pop((split, consumed_samples), None)
        if found is None:
            # Out of order: batches prefetched for the old position are useless.
            for key in [key for key in self._waiting if key[0] == split]:
                self._waiting.pop(key).cancel()
            found = self._thread.submit(self._do_read, split, consumed_samples)
        key = (split, consumed_samples)
        for _ in range(self._depth):
            key = (split, key[1] + self._batch_size(*key))
            if key[1] < self._limits.get(split, 0) and key not in self._waiting:
                self._waiting[key] = self._thread.submit(self._do_read, *key)
        return found.result()

    def _do_read(self, split: Split, consumed_samples: int) -> T:
        self.thread_id = threading.get_native_id()
        return self._read(split, consumed_samples)

    def close(self) -> None:
        """Stop prefetching, and wait for the read in progress."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._waiting.clear()


@dataclass(frozen=True)
class _Reader:
    """The reading thread, as seen by the watchdog.

    A thread that hangs ends only with its process.
    """

    batches: ReadAhead[Any]
    consumed_samples: int

    name = "the thread that reads data"

    @property
    def proc(self) -> Path:
        """See watchdog.Worker."""
        return Path(f"/proc/self/task/{self.batches.thread_id}")

    @property
    def work(self) -> str:
        """See watchdog.Worker."""
        return f"reads the batch at sample {self.consumed_samples:,}"

    def give_up(self, reason: str) -> None:
        """See watchdog.Worker."""


class BatchLoader:
    """Loads this rank's micro-batches onto the CPU.

    All ranks must make the same calls in the same order.
    """

    def __init__(
        self,
        data: TrainData,
        role: BatchRole,
        limits: Mapping[Split, int],
        depth: int = DEPTH,
        *,
        pinned_for: torch.device | None = None,
        kept: Collection[Split] = ("valid", "test"),
        report_after_s: float = REPORT_AFTER_S,
    ) -> None:
        """Read from ``data``, which ``close`` closes too.

        Args:
            data: the samples.
            role: the rank's role: it reads, receives batches from another rank, or needs none.
            limits: end of each split: the first sample that is never requested.
            depth: number of global batches to prefetch; 0: no prefetching and no thread.
            pinned_for: GPU for which the batches are put into pinned memory; None: they are not.
            kept: splits of a stream that stay in memory after the first read, if they are small.
            report_after_s: seconds without progress, for example on a dead file server, before a warning.
        """
        self._data = data
        self._role = role
        self._depth = depth
        self._pinned_for = pinned_for
        self._kept_splits = frozenset(kept)
        self._kept: dict[tuple[Split, int], Windows] = {}
        self._kept_bytes = 0
        self._watch = Watchdog(math.inf, _warn, report_after_s)
        self._batches = ReadAhead(self._read_batches, data.batch_size, limits, depth)
        self._windows = ReadAhead(self._read_windows, data.batch_size, limits, depth if data.stream is not None else 0)

    @property
    def masks_loss(self) -> bool:
        """True if some labels may not count, so that valid tokens must be counted."""
        return self._data.masks_loss

    def has(self, split: Split) -> bool:
        """True if ``split`` has samples."""
        return self._data.has(split)

    def micro_batches(self, split: Split, consumed_samples: int) -> list[MicroBatch]:
        """Micro-batches of this replica of the global batch that starts at ``consumed_samples``.

        On a rank that needs no batches they have the right shapes and dummy tokens. Collective, with streaming: all
        ranks of a replica that need its batches.

        Raises:
            DataError: the data cannot be read, or has a token outside the vocabulary.
        """
        if not self._role.needs:
            return self._data.placeholders(split, consumed_samples)
        if self._data.stream is None:
            return self._watched(self._batches, split, consumed_samples)
        windows = self._watched(self._windows, split, consumed_samples) if self._role.reads else None
        shared = self._role.share(windows, self._data.windows_shape(split, consumed_samples))
        return self._finished(self._data.of_windows(shared))

    def state(self, consumed_samples: int) -> dict[str, Any] | None:
        """Data position for a checkpoint besides ``consumed_samples``; None: not needed."""
        return self._data.state(consumed_samples) if self._role.reads else None

    def close(self) -> None:
        """Stop reading, and end all reading threads and processes."""
        # First end the processes, because the thread may wait for them.
        if self._data.stream is not None:
            self._data.stream.close()
        self._batches.close()
        self._windows.close()
        self._watch.close()

    def _watched(self, batches: ReadAhead[T], split: Split, consumed_samples: int) -> T:
        if self._data.stream is not None and self._depth:
            # The thread waits for worker processes, which the stream itself watches.
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
        if self._pinned_for is None:
            return batches
        # The current device of a thread is the first one, on which every rank would open a context.
        with torch.cuda.device(self._pinned_for):
            return [batch.pinned() for batch in batches]


def _warn(line: str) -> None:
    # Every rank prints, because every rank has a log.
    print(f"trainer: {line}", file=sys.stderr, flush=True)

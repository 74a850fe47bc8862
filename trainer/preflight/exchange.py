"""Exchange of texts between the ranks through the store of the rendezvous, with deadlines.

The store needs no collective, so that a rank without a network for collectives can still tell of that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Result = TypeVar("Result")


class LateError(Exception):
    """A measurement did not end in time; its thread may still wait."""


def bounded(function: Callable[[], Result], seconds: float, name: str) -> Result:
    """The result of ``function``, in a thread that is left alone if it does not end.

    Raises:
        LateError: it did not end in ``seconds``.
        Exception: its own.
    """
    results: list[Result] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=f"preflight-{name}", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise LateError(f"no end after {seconds:.0f} s")
    return results[0]


class Exchange:
    """Texts of all ranks, collected by rank 0 stage by stage."""

    def __init__(self, store: Store, rank: int, world_size: int, seconds: float) -> None:
        """Take ``seconds`` for all stages together, from now on."""
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds until the end of all stages."""
        return max(self._end - time.monotonic(), 0.0)

    def put(self, stage: str, text: str) -> None:
        """Give this rank's text of a stage."""
        self.store.set(f"{stage}/{self.rank}", text)

    def collect(self, stage: str, ranks: Sequence[int], seconds: float) -> dict[int, str]:
        """Texts of ``ranks``, without those of ranks that give none in time. For rank 0, which ends the stage."""
        keys = {rank: f"{stage}/{rank}" for rank in ranks}
        with suppress(RuntimeError):
            self.store.wait(list(keys.values()), _at_most(min(seconds, self.left_s)))
            return dict(zip(keys, map(_text, self.store.multi_get(list(keys.values()))), strict=True))
        there = [rank for rank, key in keys.items() if self.store.check([key])]
        return {rank: _text(self.store.get(keys[rank])) for rank in there}

    def end(self, stage: str, text: str = "") -> None:
        """End a stage for all ranks, with rank 0's text."""
        self.store.set(f"end/{stage}", text)

    def await_end(self, stage: str, seconds: float) -> str:
        """Rank 0's text at the end of a stage.

        Raises:
            RuntimeError: rank 0 does not end the stage in time, or has gone.
        """
        key = f"end/{stage}"
        self.store.wait([key], _at_most(seconds))
        return _text(self.store.get(key))


def _at_most(seconds: float) -> timedelta:
    return timedelta(seconds=max(seconds, 0.05))


def _text(value: bytes) -> str:
    return bytes(value).decode(errors="replace")

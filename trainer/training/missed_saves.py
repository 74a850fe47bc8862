"""Saves that the disk has refused in a row, and the limit at which they end a run. Torch-free."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class MissedSaves:
    """Saves missed since the last good one, counted and timed.

    Both limits must be reached: frequent saves miss many in the seconds in which somebody cleans a full disk, and rare
    ones lose hours with each.

    Attributes:
        most: number that ends the run; None: no limit.
        grace_s: seconds since the first of them before which the run does not end.
        count: saves missed in a row.
    """

    most: int | None
    grace_s: float
    count: int = 0
    _first: float = 0.0

    def add(self) -> None:
        """Count a missed save."""
        if self.count == 0:
            self._first = time.monotonic()
        self.count += 1

    def reset(self) -> None:
        """Forget them all, after a good save."""
        self.count = 0

    @property
    def are_too_many(self) -> bool:
        """True if the run shall end; by this rank's clock."""
        return self.most is not None and self.count >= self.most and self._elapsed_s >= self.grace_s

    def __str__(self) -> str:
        limit = f"; {self.most} that last {self.grace_s:g} s end the run" if self.most is not None else ""
        plural = "s" if self.count > 1 else ""
        return f"{self.count} missed save{plural} in a row, in {self._elapsed_s:.0f} s{limit}"

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._first

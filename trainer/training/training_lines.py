"""Training rows that become lines of the log: by wall time, or every one. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

FIRST_LINES = 5
"""Lines of an attempt before the clock decides: the start is where a mistake shows."""
SECONDS_PER_LINE = 10.0
"""Shortest time between two later lines."""


@dataclass
class TrainingLines:
    """Chooses the rows to print. Rank 0 alone asks, so nothing here may need another rank.

    Rows are a matter of the iteration, on which all ranks agree; only the printing looks at a clock.

    Attributes:
        log_interval: logging.log_interval; if it is set, every row is a line.
        clock: seconds since any moment.
    """

    log_interval: int | None
    clock: Callable[[], float] = time.monotonic
    _lines: int = 0
    _last: float = 0.0
    _rows: int = 0
    _seconds: float = 0.0
    _losses: dict[str, tuple[float, int]] = field(default_factory=dict)

    def next_line(self, row: Mapping[str, Any], *, is_last: bool) -> Mapping[str, Any] | None:
        """The row to print after ``row``; None if no line is due. Losses and speeds are means since the last line."""
        if self.log_interval is not None:
            return row
        self._add(row)
        now = self.clock()
        if not is_last and self._lines >= FIRST_LINES and now - self._last < SECONDS_PER_LINE:
            return None
        mean = self._mean(row)
        self._lines, self._last = self._lines + 1, now
        self._rows, self._seconds, self._losses = 0, 0.0, {}
        return mean

    def _add(self, row: Mapping[str, Any]) -> None:
        self._rows += 1
        self._seconds += row["iteration_time_s"]
        for name, loss in row.items():
            if name.endswith("_loss") and loss is not None:
                total, count = self._losses.get(name, (0.0, 0))
                self._losses[name] = (total + loss, count + 1)

    def _mean(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        seconds = self._seconds / self._rows
        pace = row["iteration_time_s"] / seconds
        losses = {name: total / count for name, (total, count) in self._losses.items()}
        speeds = {name: row[name] * pace if row[name] is not None else None for name in ("tokens_per_s", "mfu")}
        return {**row, **losses, **speeds, "iteration_time_s": seconds}

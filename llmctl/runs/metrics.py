"""Read a growing metrics.jsonl: new bytes only, whole rows only.

A run killed inside a line leaves half a row, and the next attempt may append to this half row. A replay after a resume
writes iterations again. Therefore a line counts only with its newline, and the last row of an iteration wins. An
attempt that has lost the run to another may still write a row: one with a lower fencing token than a row before it
does not count.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from llmctl.transport.file_reads import FilePart, FileRead

OTHER_ROWS = ("tasks", "save_bytes", "copy_bytes", "missed_save", "loss_spike")
"""Keys of rows without the numbers of a step or of an evaluation."""

ReadParts = Callable[[Sequence[FileRead]], list[FilePart | None]]
Row = dict[str, Any]

TAIL_BYTES = 64 * 1024
"""Holds about the last hundred rows: enough for ``status``, for a metrics file of any size."""
RECENT_ROWS = 10
"""Rows for the ETA's median iteration time: enough to ignore one slow save, few enough to be current."""


def parse_row(line: bytes) -> Row | None:
    """Parse one row of metrics; None for a line without a row.

    If an attempt was killed inside a line and the next attempt appended to this line, the whole row at the line's end
    counts. Rows are flat, so the whole row begins at the last brace.
    """
    for start in (0, line.rfind(b"{")):
        try:
            row = json.loads(line[max(start, 0) :])
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and type(row.get("iteration")) is int:
            return row
    return None


@dataclass
class MetricsTable:
    """Rows read so far: the last row per iteration, training and validation apart; and the newest spike."""

    train: dict[int, Row] = field(default_factory=dict)
    valid: dict[int, Row] = field(default_factory=dict)
    spike: Row | None = None
    _fencing_token: int = 0

    def add(self, row: Row) -> None:
        """Add a row; the latest row of an iteration replaces earlier ones. Rows of other things than steps have none.

        A row of an attempt that has lost the run to another does not count.
        """
        token = row.get("fencing_token")
        if type(token) is int:
            if token < self._fencing_token:
                return
            self._fencing_token = token
        if "loss_spike" in row:
            self.spike = row
        if any(key in row for key in OTHER_ROWS):
            return
        rows = self.valid if "valid_loss" in row else self.train
        # Removed first, so that the dictionary keeps the order of writing: the last entry is the newest.
        rows.pop(row["iteration"], None)
        rows[row["iteration"]] = row

    @property
    def newest(self) -> Row | None:
        """The last training row written."""
        return next(reversed(self.train.values()), None)

    def iteration_time_s(self) -> float | None:
        """Median seconds per iteration of the newest attempt's last rows."""
        newest = self.newest
        if newest is None:
            return None
        times: list[float] = []
        for row in reversed(self.train.values()):
            if row.get("attempt") != newest.get("attempt") or len(times) == RECENT_ROWS:
                break
            seconds = number(row, "iteration_time_s")
            if seconds is not None:
                times.append(seconds)
        return median(times) if times else None


class MetricsReader:
    """Follows one metrics.jsonl. Each ``poll`` reads only the bytes appended since the previous poll."""

    def __init__(self, path: str, read: ReadParts) -> None:
        """Read ``path`` through ``read`` (a transport's ``read_parts``)."""
        self.table = MetricsTable()
        self._path = path
        self._read = read
        self._offset = 0
        self._partial = b""

    def skip_to_tail(self) -> None:
        """Begin at the last rows, for readers of the newest rows only."""
        (part,) = self._read([tail_of(self._path)])
        self._offset = _first_whole_line(part) if part is not None else 0

    def poll(self) -> list[Row]:
        """The rows completed since the last poll, in the order of writing."""
        rows: list[Row] = []
        while True:
            (part,) = self._read([FileRead(self._path, self._offset)])
            if part is None:
                return rows
            if part.size < self._offset:
                self._offset, self._partial, self.table = 0, b"", MetricsTable()
                continue
            rows += self._take(part.data)
            self._offset = part.end
            if part.end >= part.size or not part.data:
                return rows

    def _take(self, data: bytes) -> list[Row]:
        *lines, self._partial = (self._partial + data).split(b"\n")
        rows = [row for row in map(parse_row, lines) if row is not None]
        for row in rows:
            self.table.add(row)
        return rows


def tail_of(path: str) -> FileRead:
    """The read that ``table_of_tail`` needs; the reads of many runs fit one round trip."""
    return FileRead(path, -TAIL_BYTES, TAIL_BYTES)


def table_of_tail(part: FilePart | None) -> MetricsTable:
    """The whole rows in the end of a metrics file; no rows for a missing file."""
    table = MetricsTable()
    if part is not None:
        whole = part.data[_first_whole_line(part) - part.offset : part.data.rfind(b"\n") + 1]
        for row in map(parse_row, whole.splitlines()):
            if row is not None:
                table.add(row)
    return table


def _first_whole_line(part: FilePart) -> int:
    # The first line of a tail is usually cut; its rest is dropped.
    return part.offset + part.data.find(b"\n") + 1 if part.offset > 0 else 0


def number(row: Row, key: str) -> float | None:
    """A finite number of a row; None if the key is absent or its value is another one (null, NaN, text)."""
    value = row.get(key)
    try:
        found = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return None
    return found if math.isfinite(found) else None

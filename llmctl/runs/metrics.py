"""Reading metrics.jsonl while it is being written: new bytes only, and nothing believed that is not a whole row.

A run killed in the middle of a line leaves half a row, onto which the next attempt may append; a replay after a resume
writes iterations anew. So: a line counts once its newline is there, and the last row of an iteration wins.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from llmctl.transport.file_reads import FilePart, FileRead

ReadParts = Callable[[Sequence[FileRead]], list[FilePart | None]]
Row = dict[str, Any]

TAIL_BYTES = 64 * 1024
"""Enough for the last hundred rows: what ``status`` needs of a metrics file of any size."""
RECENT_ROWS = 10
"""Rows whose median iteration time the ETA is made of: long enough to ignore one slow save, short enough to be now."""


def parse_row(line: bytes) -> Row | None:
    """One row of metrics, or None for a line that holds none.

    Where an attempt was killed within a line and the next one wrote on, the whole row at the line's end is taken: rows
    are flat, so that it begins at the last brace.
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
    """The rows read so far: the last one per iteration, training and validation apart."""

    train: dict[int, Row] = field(default_factory=dict)
    valid: dict[int, Row] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Take a row in; the latest one of an iteration replaces those before it."""
        rows = self.valid if "valid_loss" in row else self.train
        # Removed first, so that the order of the dictionary stays the order of writing: the last is the newest.
        rows.pop(row["iteration"], None)
        rows[row["iteration"]] = row

    @property
    def newest(self) -> Row | None:
        """The training row that was written last."""
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
    """Follows one metrics.jsonl. Each ``poll`` reads only what was appended since the one before."""

    def __init__(self, path: str, read: ReadParts) -> None:
        """Read ``path`` through ``read`` (a transport's ``read_parts``)."""
        self.table = MetricsTable()
        self._path = path
        self._read = read
        self._offset = 0
        self._partial = b""

    def skip_to_tail(self) -> None:
        """Begin at the last rows instead of the first, for those who want only the newest."""
        (part,) = self._read([tail_of(self._path)])
        self._offset = _first_whole_line(part) if part is not None else 0

    def poll(self) -> list[Row]:
        """The rows that are whole now and were not at the last poll, in the order of writing."""
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
    """The read that ``table_of_tail`` wants: one per run, so that many runs are asked in one round trip."""
    return FileRead(path, -TAIL_BYTES, TAIL_BYTES)


def table_of_tail(part: FilePart | None) -> MetricsTable:
    """The rows that are whole within the end of a metrics file; none for a file that is absent."""
    table = MetricsTable()
    if part is not None:
        whole = part.data[_first_whole_line(part) - part.offset : part.data.rfind(b"\n") + 1]
        for row in map(parse_row, whole.splitlines()):
            if row is not None:
                table.add(row)
    return table


def _first_whole_line(part: FilePart) -> int:
    # The first line of a tail is cut somewhere; what is left of it is dropped.
    return part.offset + part.data.find(b"\n") + 1 if part.offset > 0 else 0


def number(row: Row, key: str) -> float | None:
    """A number of a row; None where the key is absent or holds none (null, or a text such as NaN spelt out)."""
    value = row.get(key)
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    except OverflowError:
        return None

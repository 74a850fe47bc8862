"""Rows of metrics.jsonl as columns of numbers. Pure: bytes in, columns out.

A row of a long training costs microseconds here, so a chunk of rows is parsed at once, and row by row only if a line of
the chunk is damaged.
"""

import gc
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import compress
from operator import itemgetter

from llmctl.runs.metrics import OTHER_ROWS, Row, number, parse_row

ALWAYS = ("consumed_tokens", "iteration_time_s", "time")
"""Keys that the axes of a plot and the accounts of lost time need."""
NO_TOKEN = -1
"""Fencing token of rows without one, from older releases."""


@dataclass(frozen=True)
class OtherRow:
    """A row without the numbers of a step.

    Attributes:
        attempt: number of the attempt that wrote the row; 0 if the row does not say.
        time: in seconds since 1970; NaN without one.
        blocked_s: time for which the training stood for a save; None for other rows.
        written_s: time until the save was complete; likewise.
    """

    attempt: int
    time: float
    blocked_s: float | None = None
    written_s: float | None = None


@dataclass
class Columns:
    """Rows in the order of writing, a column for each key. A number that a row does not have is NaN.

    Attributes:
        iteration: of each row.
        attempt: number of the attempt that wrote the row; 0 if the row does not say.
        token: fencing token of that attempt, or NO_TOKEN.
        is_valid: 1 for a row of a validation, else 0.
        values: key -> numbers.
        others: rows of tasks, saves, missed saves and spikes; only those of a chunk, as it was parsed.
    """

    iteration: "array[int]" = field(default_factory=lambda: array("q"))
    attempt: "array[int]" = field(default_factory=lambda: array("q"))
    token: "array[int]" = field(default_factory=lambda: array("q"))
    is_valid: bytearray = field(default_factory=bytearray)
    values: dict[str, "array[float]"] = field(default_factory=dict)
    others: list[OtherRow] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.iteration)

    def extend(self, other: "Columns", begin: int, end: int) -> None:
        """Append rows ``begin`` to ``end`` of other columns."""
        before = len(self)
        self.iteration += other.iteration[begin:end]
        self.attempt += other.attempt[begin:end]
        self.token += other.token[begin:end]
        self.is_valid += other.is_valid[begin:end]
        for key in other.values.keys() - self.values.keys():
            self.values[key] = _absent(before)
        for key, column in self.values.items():
            known = other.values.get(key)
            column.extend(known[begin:end] if known is not None else _absent(end - begin))

    def selected(self, mask: bytes) -> "Columns":
        """The rows at which ``mask`` is not 0."""
        return Columns(
            array("q", compress(self.iteration, mask)),
            array("q", compress(self.attempt, mask)),
            array("q", compress(self.token, mask)),
            bytearray(compress(self.is_valid, mask)),
            {key: array("d", compress(column, mask)) for key, column in self.values.items()},
        )

    def of_training(self) -> "Columns":
        """The rows of steps."""
        return self.selected(bytes(1 - flag for flag in self.is_valid)) if any(self.is_valid) else self

    def of_validation(self) -> "Columns":
        """The rows of validations."""
        return self.selected(bytes(self.is_valid))

    def cut(self, position: int) -> None:
        """Remove the rows from ``position`` on."""
        del self.iteration[position:], self.attempt[position:], self.token[position:], self.is_valid[position:]
        for column in self.values.values():
            del column[position:]


def parse_columns(data: bytes, keys: Sequence[str]) -> Columns:
    """The numbers of whole lines of metrics.jsonl.

    Rows of tasks, saves and missed saves have no numbers of a step, and stand apart.

    Args:
        data: whole lines.
        keys: keys or patterns of keys, such as ``*_loss``.
    """
    # Thousands of short-lived rows: the collector would go over all of them again and again, a third of the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _columns(_rows(data), keys)
    finally:
        if was_enabled:
            gc.enable()


def _columns(rows: list[Row], keys: Sequence[str]) -> Columns:
    shapes = set(map(tuple, rows))
    others: list[OtherRow] = []
    if any(key in shape for shape in shapes for key in OTHER_ROWS):
        others = [_other(row) for row in rows if any(key in row for key in OTHER_ROWS)]
        rows = [row for row in rows if not any(key in row for key in OTHER_ROWS)]
    names = sorted({name for shape in shapes for name in shape if name in ALWAYS or _matches(name, keys)})
    has_valid = any("valid_loss" in shape for shape in shapes)
    return Columns(
        array("q", map(itemgetter("iteration"), rows)),
        _counts(rows, "attempt", 0),
        _counts(rows, "fencing_token", NO_TOKEN),
        bytearray("valid_loss" in row for row in rows) if has_valid else bytearray(len(rows)),
        {name: column for name in names if (column := _column(rows, name)) is not None},
        others,
    )


def _other(row: Row) -> OtherRow:
    attempt, time = row.get("attempt"), number(row, "time")
    stage, wait, drain = (number(row, f"save_{part}_s") for part in ("stage", "wait", "drain"))
    has_save = stage is not None and wait is not None
    return OtherRow(
        attempt if type(attempt) is int else 0,
        math.nan if time is None else time,
        (stage or 0.0) + (wait or 0.0) if has_save else None,
        (stage or 0.0) + (drain or 0.0) if has_save else None,
    )


def _rows(data: bytes) -> list[Row]:
    # In pydantic's core, a base dependency, a chunk takes a third of the time that the standard library takes.
    from pydantic_core import from_json

    whole = data.removesuffix(b"\n")
    try:
        rows = from_json(b"[%s]" % whole.replace(b"\n", b","))
        steps = array("q", map(itemgetter("iteration"), rows))
        if len(rows) == whole.count(b"\n") + 1 and min(steps) >= 0 and set(map(type, rows)) == {dict}:
            return rows  # type: ignore[no-any-return]
    except (ValueError, TypeError, KeyError, OverflowError):
        pass  # a damaged line, or a row of another kind: line by line
    return [row for row in map(parse_row, whole.split(b"\n")) if row is not None and 0 <= row["iteration"] < 1 << 62]


def _counts(rows: Sequence[Row], key: str, default: int) -> "array[int]":
    try:
        return array("q", map(itemgetter(key), rows))
    except (KeyError, TypeError, OverflowError):
        values = (row.get(key) for row in rows)  # some rows lack the number
        return array("q", [value if type(value) is int and 0 <= value < 1 << 62 else default for value in values])


def _matches(name: str, keys: Iterable[str]) -> bool:
    return any(fnmatchcase(name, key) for key in keys)


def _column(rows: Sequence[Row], name: str) -> "array[float] | None":
    """The numbers of a key; None if no row has a finite one."""
    try:
        return array("d", map(itemgetter(name), rows))
    except (KeyError, TypeError, OverflowError):
        numbers = [number(row, name) for row in rows]  # some rows lack the number
    if all(value is None for value in numbers):
        return None
    return array("d", [math.nan if value is None else value for value in numbers])


def _absent(count: int) -> "array[float]":
    return array("d", [math.nan]) * count

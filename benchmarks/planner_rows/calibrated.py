"""Errors of the predicted time after calibration, of models that it did not see."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.planner_rows.published import NotExpressedError, PublishedRun, published_runs
from trainer.planning.estimate.calibration import MeasuredRun, calibrate

LEAST_RUNS = 8
"""Runs of one source and device from which on they are calibrated."""


@dataclass(frozen=True)
class TimedRow:
    """A row whose time its source has."""

    row: PublishedRun
    measured: MeasuredRun


def measured_runs() -> dict[tuple[str, str], list[TimedRow]]:
    """The rows with a time, by source and device, of those with enough."""
    found = defaultdict(list)
    for row in published_runs():
        try:
            config = row.config()
        except NotExpressedError:
            continue
        seconds = row.seconds(config)
        if seconds is not None and not row.outcome:
            run = MeasuredRun(config, row.table_size, int(row.devices) // row.per_node, row.per_node, seconds)
            found[row.source, row.device].append(TimedRow(row, run))
    return {key: rows for key, rows in found.items() if len(rows) >= LEAST_RUNS}


def left_out_errors(rows: Sequence[TimedRow]) -> list[tuple[float, float]]:
    """Errors of each row without calibration, and with one by the rows of all other models."""
    found = []
    for model in dict.fromkeys(each.row.model for each in rows):
        device = rows[0].row.hardware
        factors = calibrate([each.measured for each in rows if each.row.model != model], device)
        for each in rows:
            if each.row.model == model and each.measured.seconds is not None:
                before, after = (each.measured.predicted_seconds(one) for one in (device, factors.of(device)))
                found.append((before / each.measured.seconds - 1, after / each.measured.seconds - 1))
    return found


def calibrated_lines(groups: Mapping[tuple[str, str], Sequence[TimedRow]]) -> Iterator[str]:
    """A table with a line for each source and device, and one for all."""
    yield "| source | device | rows | models | median error without | with calibration by the other models |"
    yield "|---" * 6 + "|"
    all_errors: list[tuple[float, float]] = []
    for (source, device), rows in groups.items():
        errors = left_out_errors(rows)
        all_errors += errors
        models = len({each.row.model for each in rows})
        yield f"| {source} | {device} | {len(rows)} | {models} | {' | '.join(_medians(errors))} |"
    yield f"| all | | {len(all_errors)} | | {' | '.join(_medians(all_errors))} |"


def _medians(errors: Sequence[tuple[float, float]]) -> list[str]:
    return [f"{100 * median(map(abs, part)):.1f}%" for part in zip(*errors, strict=True)]

"""Predictions of ``llmctl plan`` beside published runs.

    python -m benchmarks.planner_rows [--to PAGE]
    python -m benchmarks.planner_rows --calibrated [--to PAGE]

Prints the errors by source; with ``--to`` a page that also has every row. ``--calibrated`` calibrates by all models but
one, and prints the errors of that one's time; it takes minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.planner_rows.calibrated import LEAST_RUNS, calibrated_lines, measured_runs
from benchmarks.planner_rows.judged import (
    LEAST_GROUP,
    OWN,
    JudgedRun,
    Judgement,
    absolute,
    by_source,
    judge,
    residual,
    safety_margin,
)
from benchmarks.planner_rows.published import SOURCES, published_runs

CALIBRATED = """# Predictions after calibration

`python -m benchmarks.planner_rows --calibrated --to PAGE` makes this page. Of each source and device with at least
FEWEST published runs, every model is predicted with a calibration by the runs of the other models, as
`llmctl plan --calibrate` makes one. Errors are those of the time of a step.

"""
PAGE = """# Predictions beside published runs

`python -m benchmarks.planner_rows --to PAGE` makes this page. Each row is a run that its source reports: its shape,
layout and batch become a config of the trainer, and `llmctl plan` predicts it with no calibration. The runs are of
other trainers, with other kernels, but for those of llmctl. Errors are predicted by measured, less 1: above 0 the
prediction is too slow or too large.

- What a source does not say is assumed: layers from the number of parameters, the fewest heads of at most 128, a micro
  batch of 1 and 51,200 token ids; ZeRO and sequence parallelism as in `benchmarks/planner_rows/published.py`.
- A source's GB are taken as 10^9 bytes. Runs whose trainer casts the logits to float32 are predicted so.
- Order: Spearman's coefficient of predicted and measured time over layouts of one model, batch and number of devices,
  of at least FEWEST runs; its median over such groups, and their number.
- Rows without a shape, and runs in 8-bit floats, which the trainer does not have, are left out.
- Memory of llmctl is that of tensors, as torch counts what is allocated, and is compared with tensors. Where a source
  does not say what it counts, all of a process is predicted; nanotron's smallest, 0.9 GB, are less than a process with
  communicators takes without tensors, so that they seem to be of tensors too.
- Links are those of most machines with the device, where the source names no slower ones.
- All rows were in view when the shares of data sheets were set, those of llmctl first: none of them is a test of rows
  that nobody had seen.
- fms-fsdp shards weights within a node, which the trainer does not: its rows are planned as ZeRO-3.

"""


def main() -> None:
    """Print the table, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, help="write this page")
    parser.add_argument("--calibrated", action="store_true", help="calibrate by all models but one")
    options = parser.parse_args()
    if options.calibrated:
        table = "\n".join(calibrated_lines(measured_runs()))
        print(table)
        if options.to is not None:
            head = CALIBRATED.replace("FEWEST", str(LEAST_RUNS))
            options.to.write_text(f"{head}{table}\n", encoding="utf-8")
        return
    rows = [judge(run) for run in published_runs()]
    summary = [*summary_lines(by_source(rows)), "", *margin_lines(rows)]
    print("\n".join(summary))
    if options.to is not None:
        cited = [f"- {name}: {source.citation}" for name, source in SOURCES.items()]
        head = PAGE.replace("FEWEST", str(LEAST_GROUP))
        parts = [head + "\n".join(summary), "## Sources", "\n".join(cited), "## Rows", "\n".join(row_lines(rows))]
        options.to.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def summary_lines(judged: dict[str, Judgement]) -> Iterator[str]:
    """A table with a line for each source."""
    yield (
        "| source | rows | left out | time: rows | median error | bias | within 10% | order | memory: rows "
        "| median error | bias | low by over 5% | ran, said to fit or tight | did not, said to fit |"
    )
    yield "|---" * 14 + "|"
    for name, found in judged.items():
        cells = [name, str(found.rows), str(found.rows - found.predicted)]
        cells += _error_cells(found.times)
        cells.append(f"{sum(abs(error) <= 0.1 for error in found.times)}" if found.times else "")
        cells.append(f"{median(found.orders):.2f} of {len(found.orders)}" if found.orders else "")
        cells += _error_cells(found.memories)
        cells.append(str(found.low) if found.memories else "")
        cells += [f"{count} of {all_rows}" if all_rows else "" for count, all_rows in (found.fitting, found.false_fits)]
        yield f"| {' | '.join(cells)} |"


def margin_lines(rows: Sequence[JudgedRun]) -> Iterator[str]:
    """A table of margins: by the residuals of own runs and of other trainers, and that of the planner."""
    chosen = safety_margin(rows)
    own, others = (
        residual([row for row in rows if (row.run.source == OWN) is is_own]) or 1.0 for is_own in (True, False)
    )
    known = [row for row in rows if not row.left_out]
    ran, failed = ([row for row in known if row.ran is has_run] for has_run in (True, False))
    yield "| margin | | ran, said to be tight | did not, said to fit |"
    yield "|---" * 4 + "|"
    reasons = (
        (own, "95th percentile, own runs"),
        (chosen, "of the planner"),
        (others, "95th percentile, other trainers"),
    )
    for margin, reason in reasons:
        tight = sum(1 <= row.room < margin for row in ran)
        fits = sum(row.room >= margin for row in failed)
        yield f"| {margin:.2f} | {reason} | {tight} of {len(ran)} | {fits} of {len(failed)} |"


def _error_cells(errors: Sequence[float]) -> list[str]:
    if not errors:
        return ["", "", ""]
    return [str(len(errors)), f"{100 * absolute(errors):.1f}%", f"{100 * median(errors):+.1f}%"]


def row_lines(rows: Sequence[JudgedRun]) -> Iterator[str]:
    """A table with a line for each row."""
    yield "| source | model | devices | layout | step s | predicted | error | GB | predicted | error | fits |"
    yield "|---" * 11 + "|"
    for row in rows:
        run = row.run
        layout = f"tp {run.tp} pp {run.pp} dp {run.dp or '?'} mbs {run.micro_batch or '1?'}"
        layout += f" x{run.chunks}" if run.chunks not in ("", "1") else ""
        layout += f" cp {run.cp}" if run.cp not in ("", "1") else ""
        layout += f" ZeRO-{run.zero}" if run.zero not in ("", "0") else ""
        layout += f" {run.recompute}" if run.recompute not in ("", "none") else ""
        cells = [run.source, run.model, f"{run.devices} x {run.device}", layout]
        if row.left_out:
            yield f"| {' | '.join(cells)} | left out: {row.left_out} | | | | | | |"
            continue
        cells += _compared(row.measured_s, row.predicted_s, row.time_error)
        cells += _compared(row.measured_gb, row.predicted_gb, row.memory_error)
        cells.append(("tight" if row.tight else "yes" if row.fits else "no") + ("" if row.ran else ", did not run"))
        yield f"| {' | '.join(cells)} |"


def _compared(measured: float | None, predicted: float, error: float | None) -> list[str]:
    shown = "" if measured is None else f"{measured:.3g}"
    return [shown, f"{predicted:.3g}", "" if error is None else f"{100 * error:+.0f}%"]


if __name__ == "__main__":
    main()

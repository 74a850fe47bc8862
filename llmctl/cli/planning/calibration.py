"""``llmctl plan --calibrate``: fit predictions to the user's runs on a cluster, and show by how much that helps."""

from collections.abc import Iterator
from statistics import median

from llmctl.cli.console import print_json
from llmctl.context import Context, say
from llmctl.operate.comparison.calibration import calibrate_cluster
from llmctl.runs.number_text import memory_text
from llmctl.submit.preview.calibration import CalibratedRun, Calibration, calibration_file
from trainer.planning.estimate.calibration import TERMS

_SHOWN = 0.02
"""Least change of a term that is named."""


def show_calibration(context: Context, cluster: str | None, *, as_json: bool) -> int:
    """Calibrate, print the runs, and name the file."""
    found = calibrate_cluster(context, cluster)
    if as_json:
        print_json(found.as_json())
        return 0
    for line in _lines(found):
        print(line)
    say(f"kept in {calibration_file(context.folders, found.cluster)}; llmctl plan and submit use it on {found.cluster}")
    return 0


def _lines(found: Calibration) -> Iterator[str]:
    runs = found.runs
    longest = max(4, *(len(run.name) for run in runs))
    yield f"{'NAME':{longest}}  {'STEP S':>8}  {'BEFORE':>7}  {'AFTER':>7}  {'MEMORY':>9}  {'AFTER':>7}  LAYOUT"
    for run in runs:
        errors = [f"{100 * (each / run.measured_s - 1):+.0f}%" for each in (run.before_s, run.after_s)]
        memory, after = ("", "") if run.measured_bytes is None else _memory(run, run.measured_bytes)
        yield (
            f"{run.name:{longest}}  {run.measured_s:>8.3g}  {errors[0]:>7}  {errors[1]:>7}  {memory:>9}  {after:>7}  "
            f"{run.layout}"
        )
    before, after_all = (
        100 * median(abs(getattr(run, key) / run.measured_s - 1) for run in runs) for key in ("before_s", "after_s")
    )
    yield f"median error of the time: {before:.1f}% before, {after_all:.1f}% after, of {found.device}"
    changed = [f"{term} {getattr(found.factors, term):.2f}" for term in TERMS if _is_changed(found, term)]
    yield f"time of each term, by its data sheet: {', '.join(changed) or 'as before'}"


def _is_changed(found: Calibration, term: str) -> bool:
    return abs(float(getattr(found.factors, term)) - 1) >= _SHOWN


def _memory(run: CalibratedRun, measured: int) -> tuple[str, str]:
    return memory_text(measured), f"{100 * (run.after_bytes / measured - 1):+.0f}%"

"""Result of a trial, from the files that its ranks have written. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from trainer.process.run_directory import RunDirectory
from trainer.tuning.contest import WARM_UP, Outcome, Trial, TrialResult

HOPELESS = 2.0
"""Time of a step, in times of the best of the round, from which on a trial is ended early."""
_FEWEST = 2
_NO_MEMORY = re.compile(r"out of memory|OutOfMemoryError|cannot allocate memory|failed to allocate", re.IGNORECASE)
_KILLED = -9
"""End of a process that the kernel kills for memory."""


def step_times(folder: Path) -> list[float]:
    """Times of the steps that count so far."""
    return [float(row["iteration_time_s"]) for row in _rows(folder) if "iteration_time_s" in row][WARM_UP:]


def is_enough(times: list[float], steps: int, best: float | None) -> bool:
    """True if a trial has all its steps, or is so slow that it cannot win."""
    return len(times) >= steps or (best is not None and len(times) >= _FEWEST and median(times) > HOPELESS * best)


def result_of(trial: Trial, folder: Path, codes: list[int], *, enough: bool) -> TrialResult:
    """The result of a trial whose ranks have ended.

    Args:
        trial: the trial.
        folder: its run directory.
        codes: exit codes of the ranks of all nodes that ended by themselves.
        enough: True if the trial was ended because it had its steps.
    """
    times = step_times(folder)
    if times and (enough or len(times) >= trial.steps):
        peaks = [int(row["peak_memory_bytes"]) for row in _rows(folder) if row.get("peak_memory_bytes")]
        return TrialResult(trial.candidate, trial.round, Outcome.OK, median(times), max(peaks, default=None))
    reason = reason_of(folder)
    if _NO_MEMORY.search(reason) or (not reason and _KILLED in codes):
        return TrialResult(trial.candidate, trial.round, Outcome.OUT_OF_MEMORY, reason=reason or "killed (SIGKILL)")
    ends = ", ".join(str(code) for code in sorted(set(codes)))
    return TrialResult(trial.candidate, trial.round, Outcome.FAILED, reason=reason or f"ranks ended with {ends}")


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    try:
        text = RunDirectory(folder).metrics.read_text(encoding="utf-8")
    except OSError:
        return
    for line in text.splitlines(keepends=True):
        # The last line may be in the making.
        if line.endswith("\n"):
            row = json.loads(line)
            if isinstance(row, dict):
                yield row


def reason_of(folder: Path) -> str:
    """The first failure without another as its cause, on one line; empty: no rank has recorded any."""
    found = []
    for path in (RunDirectory(folder).attempt_dir / "errors").glob("rank-*.json"):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if not record["consequence"]:
                found.append((float(record["time"]), f"{record['type']}: {record['message']}"))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return " ".join(min(found)[1].split())[:300] if found else ""

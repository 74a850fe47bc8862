"""Rows of earlier attempts, from metrics.jsonl, for a tracker that lacks them. Torch-free.

A tracker may be new in a resumed run, may have been unable to begin before, or may have lost its last rows with a kill.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def earlier_rows(path: Path, after: int, until: int) -> Iterator[dict[str, Any]]:
    """Rows with ``after`` < iteration <= ``until``, in order; of rows that were done again the last.

    Args:
        path: of metrics.jsonl.
        after: last iteration that the tracker has.
        until: iteration at which this attempt begins.
    """
    if after >= until or not path.is_file():
        return
    kept: dict[tuple[int, str], bytes] = {}
    with path.open("rb") as file:
        for line in file:
            row = _row(line)
            if row is not None and _kind(row) and after < row["iteration"] <= until:
                kept[row["iteration"], _kind(row)] = line
    # Training rows first, since they count the samples.
    last = before = (0, 0)
    for key in sorted(kept, key=lambda key: (key[0], key[1] != "lm_loss")):
        row = _row(kept[key]) or {}
        if "consumed_samples" in row:
            before, last = last, (row["iteration"], row["consumed_samples"])
        # Between training rows by the mean batch before them: a batch may grow.
        batch = (last[1] - before[1]) / max(1, last[0] - before[0])
        yield {**row, "consumed_samples": round(last[1] + batch * (row["iteration"] - last[0]))}


def _row(line: bytes) -> dict[str, Any] | None:
    """A row; None for a line that was not written whole."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("iteration"), int) else None


def _kind(row: dict[str, Any]) -> str:
    return next((key for key in ("lm_loss", "valid_loss", "tasks") if key in row), "")

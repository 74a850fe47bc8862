"""Saved progress of a run, by its record saved.json or by older signs. Pure and torch-free.

The trainer writes the record when it starts and at each complete checkpoint. Before a start without a checkpoint, the
trainer and ``llmctl resume`` ask for saved progress: then the folder of checkpoints is missing, and the run must not
begin again at iteration 0. Older releases wrote no record; their runs are judged by outcome.json and metrics.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SAVED = "saved.json"
"""Name in the run directory."""
METRICS_TAIL = 1 << 16
"""Bytes at the end of metrics.jsonl that are sufficient for a judgement."""


@dataclass(frozen=True)
class SavedProgress:
    """Progress that lies in a checkpoint.

    Attributes:
        iteration: of the newest checkpoint that was saved.
        trained: newest iteration in metrics.jsonl; 0 without one.
        folder: folder of that checkpoint; empty if unknown.
        source: name of the file that shows the save.
        run_dir: the run directory.
    """

    iteration: int
    trained: int
    folder: str
    source: str
    run_dir: str

    def missing(self, folder: str, lack: str) -> str:
        """The sentence that refuses a start at iteration 0.

        Args:
            folder: the folder of checkpoints.
            lack: what is wrong with it, such as ``is empty``.
        """
        place = f" in {self.folder}" if self.folder not in ("", folder) else ""
        until = f"saved until {self.iteration}{place}"
        shown = f"{until} ({self.source})"
        if self.trained:
            trained = max(self.trained, self.iteration)
            shown = f"trained to iteration {trained} and {until} (metrics.jsonl, {self.source})"
        return (
            f"checkpoint folder {folder} {lack}, but the run has {shown}; mount or restore the folder and resume, or "
            f"start from scratch with a new run: llmctl submit {self.run_dir}/config.yaml"
        )


def record_of(iteration: int | None, folder: str, attempt: int, time: float) -> dict[str, Any]:
    """Content of saved.json; ``iteration`` None: nothing is saved yet."""
    return {"iteration": iteration, "folder": folder, "attempt": attempt, "time": time}


def find_saved_progress(
    run_dir: str,
    record: bytes | None,
    metrics: bytes | None,
    outcomes: Iterable[bytes | None],
    save_interval: int | None,
) -> SavedProgress | None:
    """Saved progress of a run; None if nothing was ever saved.

    Args:
        run_dir: the run directory.
        record: content of saved.json; None without the file.
        metrics: the end of metrics.jsonl.
        outcomes: content of the outcome.json of each attempt.
        save_interval: checkpoint.save_interval of the run.
    """
    rows = [row for line in (metrics or b"").splitlines() if (row := _mapping(line)) is not None]
    trained = max((_number(row) for row in rows), default=0)
    values = _mapping(record)
    if values is not None and "iteration" in values:
        saved, folder = _number(values), str(values.get("folder") or "")
        return SavedProgress(saved, trained, folder, SAVED, run_dir) if saved else None
    # A regular end saves first.
    ended = max((_number(outcome) for data in outcomes if (outcome := _mapping(data)) is not None), default=0)
    if ended:
        return SavedProgress(ended, trained, "", "outcome.json", run_dir)
    due = _last_save_due(rows, trained, save_interval)
    return SavedProgress(due, trained, "", f"checkpoint.save_interval {save_interval}", run_dir) if due else None


def _last_save_due(rows: Sequence[Mapping[str, Any]], trained: int, save_interval: int | None) -> int:
    """Newest iteration that a run without a record must have saved; 0 if there is none.

    The row of an iteration is written before its save, so that only a later row proves the save.
    """
    if save_interval is None:
        return 0
    missed = {_number(row) for row in rows if "missed_save" in row}
    newest = (trained - 1) // save_interval * save_interval
    return next((due for due in range(newest, 0, -save_interval) if due not in missed), 0)


def _mapping(data: bytes | None) -> dict[str, Any] | None:
    try:
        values = json.loads(data) if data else None
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _number(values: Mapping[str, Any]) -> int:
    value = values.get("iteration")
    return value if isinstance(value, int) and not isinstance(value, bool) else 0

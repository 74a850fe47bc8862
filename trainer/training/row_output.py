"""Output of rank 0's rows: metrics.jsonl, which is the truth, and the trackers."""

from __future__ import annotations

import hashlib
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.process.metrics import MetricsFile
from trainer.trackers.protocol import RunFacts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainer.config.train_config import TrainConfig
    from trainer.distributed.mesh import ParallelMesh
    from trainer.process.progress import TrainingProgress
    from trainer.process.run_directory import RunDirectory
    from trainer.process.run_lock import RunLock
    from trainer.trackers.tracking import Tracking


@dataclass(frozen=True)
class RowOutput:
    """Takes the rows.

    Attributes:
        file: None without a run directory.
        tracking: the trackers, which may be none.
        progress: of the run.
    """

    file: MetricsFile | None
    tracking: Tracking
    progress: TrainingProgress

    def append(self, row: Mapping[str, Any], batch_size: int) -> None:
        """Write a row of the current iteration, of ``batch_size`` samples. Never fails, and waits for the file only."""
        if self.file is not None:
            self.file.append(row)
        self.tracking.log(row, self.progress.consumed_samples, batch_size)

    def append_of_save(self, row: Mapping[str, Any]) -> None:
        """Write a row of a save, to the file only: its iteration may be an earlier one, and trackers take no such."""
        if self.file is not None:
            self.file.append(row)

    def close(self) -> None:
        """Close the file. The trackers end with the attempt."""
        if self.file is not None:
            self.file.close()


def begin_rows(
    config: TrainConfig,
    mesh: ParallelMesh,
    run: RunDirectory | None,
    lock: RunLock | None,
    tracking: Tracking,
    progress: TrainingProgress,
    save: Path | None,
) -> RowOutput:
    """Open metrics.jsonl and begin the trackers, at the iteration where this attempt begins. Rank 0 only."""
    tracking.begin(_facts(config, mesh, run, progress.iteration, save))
    file = MetricsFile(run.metrics, lock) if run is not None else None
    return RowOutput(file, tracking, progress)


def _facts(
    config: TrainConfig, mesh: ParallelMesh, run: RunDirectory | None, iteration: int, save: Path | None
) -> RunFacts:
    record = _read(run, "run.json") if run is not None else {}
    job = _read(run, "job.json") if run is not None else {}
    run_id = run.path.name if run is not None else _id_without_run(save)
    code = record.get("code") or {}
    known = {
        "cluster": record.get("cluster"),
        "llmctl": record.get("llmctl_version"),
        "commit": code.get("commit"),
        "uncommitted changes": "yes" if code.get("diff") else None,
        "nodes": job.get("nodes"),
        "spare nodes": job.get("spare_nodes"),
        f"{job.get('points_unit') or 'points'} per node-hour": job.get("points_per_node_hour"),
    }
    axes = ("tp", "pp", "cp", "dp", "ep", "world_size")
    return RunFacts(
        run_id=run_id,
        name=str(record.get("name") or run_id),
        attempt=run.attempt if run is not None else 1,
        iteration=iteration,
        config=config.model_dump(mode="json"),
        layout={axis: getattr(mesh, axis) for axis in axes},
        origin={name: str(value) for name, value in known.items() if value},
        folder=run.path if run is not None else None,
    )


def _read(run: RunDirectory, name: str) -> dict[str, Any]:
    """A file that llmctl wrote; empty if it cannot be read here, as on hosts with a disk of their own."""
    try:
        found = json.loads((run.path / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _id_without_run(save: Path | None) -> str:
    """An id that a resumed run finds again: by the folder of its checkpoints. Without one nothing is resumed."""
    if save is None:
        return time.strftime("%Y%m%d-%H%M%S")
    # Some trackers take only these characters.
    name = re.sub(r"[^A-Za-z0-9._-]", "-", save.name)
    return f"{name}-{hashlib.sha256(str(save.resolve()).encode()).hexdigest()[:8]}"

"""The saves of a training loop: each with its outcome, told and counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer.conversion.beside_checkpoint import write_hub_folder
from trainer.distributed.collectives import any_rank
from trainer.process.metrics import missed_row
from trainer.training.lost_lock import check_lock
from trainer.training.missed_saves import MissedSaves

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from trainer.checkpoint.save import CheckpointWriter, MissedSave
    from trainer.config.sections.checkpoint import CheckpointConfig
    from trainer.data.loading.loader import BatchLoader
    from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
    from trainer.parallel_model import ParallelModel
    from trainer.process.heartbeat import Heartbeat
    from trainer.process.progress import TrainingProgress
    from trainer.process.run_lock import RunLock


@dataclass
class Saving:
    """One rank's saves. All methods are collective: all ranks, at the same iteration.

    Attributes:
        writer: None disables saving.
        lock: on global rank 0 of a run with a directory, else None.
        saved_iteration: iteration of an existing checkpoint, which is not written again.
        before_save: called before each save.
        append: takes the rows of rank 0.
    """

    config: CheckpointConfig
    model: ParallelModel
    optimizer: MixedPrecisionOptimizer
    data: BatchLoader
    progress: TrainingProgress
    heartbeat: Heartbeat
    device: torch.device
    writer: CheckpointWriter | None
    lock: RunLock | None
    attempt: int
    saved_iteration: int | None
    before_save: Callable[[], None]
    append: Callable[[dict[str, Any]], None]
    _missed: MissedSaves = field(init=False)

    def __post_init__(self) -> None:
        self._missed = MissedSaves(self.config.max_missed_saves, self.config.missed_saves_grace_s)

    def save(self, *, is_good: bool = True, is_last: bool = False) -> None:
        """Save, unless this iteration is saved. A failure of the disk ends the run at the limit, or at the last save.

        Args:
            is_good: False keeps older checkpoints beyond checkpoint.keep_last.
            is_last: no later save can make up for this one.

        Raises:
            CheckpointError: a rank met this end.
            LostLockError: on rank 0, another process has taken the run over.
            PeerFailedError: another rank met one of these.
        """
        iteration = self.progress.iteration
        if self.writer is None or self.saved_iteration == iteration:
            return
        self.heartbeat.beat(iteration, "checkpoint")
        self.before_save()
        began = time.perf_counter()
        self.progress.data_state = self.data.state(self.progress.consumed_samples)
        missed = self.writer.save(self.model, self.optimizer, self.progress, deletes_old=is_good)
        if missed is not None:
            self._miss(missed, is_last=is_last)
            return
        seconds = time.perf_counter() - began
        self._missed.reset()
        self.heartbeat.warn("")
        self.saved_iteration = iteration
        self._say(f"iteration {iteration} saved to {self.writer.root} in {seconds:.1f} s")
        if self.config.save_hugging_face:
            check_lock(self.lock, self.device)
            self._write_hub_folder(self.writer.root)

    def _miss(self, missed: MissedSave, *, is_last: bool) -> None:
        """Tell of a save that the disk refused, and end the run if it was one too many."""
        self._missed.add()
        # By the clock of rank 0, so that all ranks end together.
        decides = self.model.mesh.rank == 0
        ends = is_last or any_rank(decides and self._missed.are_too_many, self.device)
        warning = f"{missed.sentence}; {self._missed}"
        # The error of the run has the sentence, and status shows both.
        self.heartbeat.warn(str(self._missed) if ends else warning)
        self.append(missed_row(self.attempt, self.progress.iteration, missed.sentence))
        self._say(f"iteration {self.progress.iteration}: {warning}")
        if ends:
            raise missed.error()

    def _write_hub_folder(self, root: Path) -> None:
        began, iteration = time.perf_counter(), self.progress.iteration
        self.heartbeat.beat(iteration, "export")
        problem = write_hub_folder(root, iteration, self.model.mesh.rank, self.device)
        seconds = time.perf_counter() - began
        self._say(
            f"iteration {iteration}: Hugging Face folder written in {seconds:.1f} s"
            if problem is None
            else f"iteration {iteration}: the checkpoint is complete, but its Hugging Face folder is not: {problem}"
        )

    def _say(self, line: str) -> None:
        if self.model.mesh.rank == 0:
            print(line, flush=True)

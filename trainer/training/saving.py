"""The saves of a training loop: each with its outcome, told and counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.saving.draining import Draining
from trainer.checkpoint.saving.host_copy import HostCopy, copied_bytes
from trainer.checkpoint.saving.memory_check import check_copies_fit
from trainer.conversion.beside_checkpoint import write_hub_folder
from trainer.distributed.collectives import any_rank
from trainer.ops.build.compile_jobs import free_memory
from trainer.process.metrics import missed_row, saved_row
from trainer.training.copying import Copying
from trainer.training.missed_saves import MissedSaves
from trainer.training.polling import check_lock

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from trainer.checkpoint.copies.state_copies import StateCopies
    from trainer.checkpoint.save import CheckpointWriter, Drained, MissedSave
    from trainer.config.sections.checkpoint import CheckpointConfig
    from trainer.data.loading.loader import BatchLoader
    from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
    from trainer.parallel_model import ParallelModel
    from trainer.process.heartbeat import Heartbeat
    from trainer.process.progress import TrainingProgress
    from trainer.process.run_lock import RunLock
    from trainer.training.row_output import RowOutput


@dataclass(frozen=True)
class _PendingSave:
    """A save whose outcome was not taken.

    Attributes:
        iteration: of the state.
        root: folder of checkpoints.
        is_last: the run ends with it.
    """

    iteration: int
    root: Path
    is_last: bool


@dataclass
class Saving:
    """One rank's saves. All methods are collective: all ranks, at the same iteration.

    Attributes:
        writer: None disables saving.
        lock: on global rank 0 of a run with a directory, else None.
        saved_iteration: iteration of an existing checkpoint, which is not written again.
        before_save: called before each save.
        metrics: takes the rows of rank 0; None elsewhere.
        copies: of the state on the nodes; None without.
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
    metrics: RowOutput | None
    copies: StateCopies | None = None
    _copying: Copying = field(init=False)
    _missed: MissedSaves = field(init=False)
    _draining: Draining[Drained] = field(default_factory=Draining)
    _memory: HostCopy = field(init=False)
    _pending: _PendingSave | None = None

    def __post_init__(self) -> None:
        self._missed = MissedSaves(self.config.max_missed_saves, self.config.missed_saves_grace_s)
        self._memory = HostCopy(self.device)
        self._copying = Copying(
            self.config.copy_interval,
            self.copies,
            self.model,
            self.optimizer,
            self.data,
            self.progress,
            self.heartbeat,
            self.metrics,
            self.attempt,
        )

    def reserve(self) -> None:
        """Take the host memory for the copies of all saves, and tell of it; without async_save none.

        Raises:
            ConfigError: a node has too little; on all ranks.
        """
        if self.writer is None or not self.config.async_save:
            return
        size = copied_bytes(self.writer.stage(self.model, self.optimizer, self.progress))
        free = free_memory()
        memory = check_copies_fit(size, free, self.device)
        self._memory.reserve(size)
        self._say(
            f"saves beside the training: copies of {memory.of_rank / 2**30:.2f} GiB of host memory on a rank, "
            f"{memory.of_node / 2**30:.2f} GiB on a node, of {free / 2**30:.2f} GiB that are available"
        )

    def save(self, *, is_good: bool = True, is_last: bool = False) -> None:
        """Save, unless this iteration is saved. A failure of the disk ends the run at the limit, or at the last save.

        With async_save the checkpoint is written beside the next iterations, after the end of the save before; only the
        last one is complete on return.

        Args:
            is_good: False keeps older checkpoints beyond checkpoint.keep_last.
            is_last: no later save can make up for this one.

        Raises:
            CheckpointError: a rank met this end.
            LostLockError: on rank 0, another process has taken the run over.
            PeerFailedError: another rank met one of these.
        """
        if self.writer is None:
            return
        self.finish()
        iteration = self.progress.iteration
        if self.saved_iteration == iteration:
            return
        self.heartbeat.beat(iteration, "checkpoint")
        self.before_save()
        self.progress.data_state = self.data.state(self.progress.consumed_samples)
        memory = self._memory if self.config.async_save else None
        staged = self.writer.stage(self.model, self.optimizer, self.progress, memory)
        self._pending = _PendingSave(iteration, self.writer.root, is_last)
        drain = partial(self.writer.drain, staged, deletes_old=is_good)
        if memory is None:
            drained = drain()
            self._settle(drained, drained.drain_s)
            return
        self._draining.begin(drain)
        if is_last:
            self.finish()

    def copy(self, *, skips: bool) -> None:
        """Copy the state to the nodes if a copy is due, unless it ``skips``, or this iteration is saved."""
        known = (self.saved_iteration, self._pending.iteration if self._pending is not None else None)
        self._copying.copy_if_due(skips=skips or self.progress.iteration in known)

    def end_copies(self) -> None:
        """Delete all copies, at the end of a run whose last save is complete."""
        self._copying.end()

    @property
    def has_drained(self) -> bool:
        """True if this rank has written its part of a save, whose outcome was not taken. Not collective."""
        return self._draining.has_ended

    def finish(self) -> None:
        """Take the outcome of the save that is being written, if any, at its end.

        Raises: see save.
        """
        if self._pending is not None:
            self.heartbeat.beat(self.progress.iteration, "checkpoint")
            began = time.perf_counter()
            drained = self._draining.take()
            self._settle(drained, time.perf_counter() - began)

    def wait(self) -> None:
        """Wait for the save that is being written, if any, without its outcome: for a run that ends by an error."""
        self._draining.wait()

    def _settle(self, drained: Drained, wait_s: float) -> None:
        """Tell of the end of a save, for which the training waited ``wait_s``, and count it."""
        save, self._pending = self._pending, None
        assert save is not None
        if drained.missed is not None:
            self._miss(drained.missed, save)
            return
        self._missed.reset()
        self.heartbeat.warn("")
        self.saved_iteration = save.iteration
        beside = f"; training waited {drained.stage_s + wait_s:.1f} s of them" if self.config.async_save else ""
        self._say(f"iteration {save.iteration} saved to {save.root} in {drained.drain_s:.1f} s{beside}")
        stage_s, drain_s, size = drained.stage_s, drained.drain_s, drained.written_bytes
        row = saved_row(self.attempt, save.iteration, size, stage_s=stage_s, wait_s=wait_s, drain_s=drain_s)
        self._append(row)
        self.heartbeat.note_save(save.iteration, size, stage_s + wait_s, drain_s)
        if self.config.save_hugging_face:
            check_lock(self.lock, self.device)
            self._write_hub_folder(save)

    def _miss(self, missed: MissedSave, save: _PendingSave) -> None:
        """Tell of a save that the disk refused, and end the run if it was one too many."""
        self._missed.add()
        # By the clock of rank 0, so that all ranks end together.
        decides = self.model.mesh.rank == 0
        ends = save.is_last or any_rank(decides and self._missed.are_too_many, self.device)
        warning = f"{missed.sentence}; {self._missed}"
        # The error of the run has the sentence, and status shows both.
        self.heartbeat.warn(str(self._missed) if ends else warning)
        self._append(missed_row(self.attempt, save.iteration, missed.sentence))
        self._say(f"iteration {save.iteration}: {warning}")
        if ends:
            raise missed.error()

    def _write_hub_folder(self, save: _PendingSave) -> None:
        began, iteration = time.perf_counter(), save.iteration
        self.heartbeat.beat(self.progress.iteration, "export")
        problem = write_hub_folder(save.root, iteration, self.model.mesh.rank, self.device)
        seconds = time.perf_counter() - began
        self._say(
            f"iteration {iteration}: Hugging Face folder written in {seconds:.1f} s"
            if problem is None
            else f"iteration {iteration}: the checkpoint is complete, but its Hugging Face folder is not: {problem}"
        )

    def _append(self, row: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.append_of_save(row)

    def _say(self, line: str) -> None:
        if self.model.mesh.rank == 0:
            print(line, flush=True)

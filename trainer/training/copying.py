"""The copies of a training loop: when they are made, and what is told of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from trainer.checkpoint.copies.start import Start, restore_newest, submission_of
from trainer.checkpoint.copies.state import stage_state
from trainer.checkpoint.copies.state_copies import Copied, StateCopies
from trainer.checkpoint.saving.draining import Draining
from trainer.ops.build.compile_jobs import free_memory
from trainer.process.metrics import copied_row

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from trainer.config.records.saved_progress import SavedProgress
    from trainer.config.train_config import TrainConfig
    from trainer.data.loading.loader import BatchLoader
    from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
    from trainer.parallel_model import ParallelModel
    from trainer.process.heartbeat import Heartbeat
    from trainer.process.launch_environment import LaunchEnvironment
    from trainer.process.progress import TrainingProgress
    from trainer.process.run_directory import RunDirectory
    from trainer.training.row_output import RowOutput


def go_on(
    config: TrainConfig,
    vocab_size: int,
    launch: LaunchEnvironment,
    run: RunDirectory | None,
    state: tuple[ParallelModel, MixedPrecisionOptimizer, TrainingProgress],
    device: torch.device,
    save: Path | None,
    kernels: Mapping[str, str],
    saved: SavedProgress | None,
) -> tuple[StateCopies | None, Start]:
    """Open the copies of a rank, and go on from them or from a checkpoint. Collective: all ranks.

    Args:
        config: of the run.
        vocab_size: of the data.
        launch: tells the ranks of a node.
        run: directory of the run.
        state: receives the state of the run.
        device: of the state.
        save: folder of the run's own checkpoints.
        kernels: see restore.
        saved: see restore.

    Raises:
        ConfigError: a node has too little memory for copies.
        CheckpointError, PeerFailedError: see restore.
    """
    copies = _open_copies(config, vocab_size, launch, run, state, device)
    return copies, restore_newest(copies, run, config, save, *state, device, kernels, saved)


def _open_copies(
    config: TrainConfig,
    vocab_size: int,
    launch: LaunchEnvironment,
    run: RunDirectory | None,
    state: tuple[ParallelModel, MixedPrecisionOptimizer, TrainingProgress],
    device: torch.device,
) -> StateCopies | None:
    """The copies of a rank, with their host memory; None without checkpoint.copy_interval. Collective: all ranks.

    Raises:
        ConfigError: a node has too little memory.
    """
    if config.checkpoint.copy_interval is None:
        return None
    if run is None:
        _say(launch.rank, "no copies are made: checkpoint.copy_interval needs a run that llmctl has started")
        return None
    numbers, (model, optimizer, progress) = (submission_of(run, run.attempt), run.attempt), state
    copies = StateCopies.open(config, vocab_size, launch, run.path, numbers, model, optimizer, device)
    if copies.problem:
        _say(launch.rank, f"no copies are made: {copies.problem}")
        return copies
    memory = copies.reserve(stage_state(model, optimizer, progress), free_memory(), launch.local_rank == 0)
    _say(launch.rank, f"copies of the state take {memory / 2**30:.2f} GiB of memory on a node")
    return copies


@dataclass
class Copying:
    """One rank's copies in a training loop. All methods are collective, at the same iteration.

    Attributes:
        interval: iterations between copies.
        copies: None makes none.
    """

    interval: int | None
    copies: StateCopies | None
    model: ParallelModel
    optimizer: MixedPrecisionOptimizer
    data: BatchLoader
    progress: TrainingProgress
    heartbeat: Heartbeat
    metrics: RowOutput | None
    attempt: int
    _draining: Draining[Copied] = field(default_factory=Draining)
    _iteration: int = 0
    _has_told: bool = False

    def copy_if_due(self, *, skips: bool = False) -> None:
        """Copy the state of this iteration, if one is due, unless it ``skips``; written beside the next iterations.

        Training waits for a copy that is still being written when the next one is due.
        """
        if self._draining.has_ended:
            self._settle()
        copies = self.copies
        if skips or copies is None or self.interval is None or self.progress.iteration % self.interval:
            return
        self.heartbeat.beat(self.progress.iteration, "checkpoint")
        if self._draining.is_pending:
            self._settle()
        if copies.problem:
            return
        self.progress.data_state = self.data.state(self.progress.consumed_samples)
        staged = copies.stage(self.model, self.optimizer, self.progress)
        self._iteration = self.progress.iteration
        self._draining.begin(partial(copies.drain, staged))

    def end(self) -> None:
        """Delete all copies at the end of the run, whose last checkpoint is complete."""
        if self._draining.is_pending:
            self._settle()
        if self.copies is not None:
            self.copies.discard()

    def _settle(self) -> None:
        """Take the outcome of a copy, at its end, and tell of it."""
        assert self.copies is not None
        began = time.perf_counter()
        copied = self._draining.take()
        wait_s = time.perf_counter() - began
        rank = self.model.mesh.rank
        if copied.problem:
            self.copies.problem = copied.problem
            _say(rank, f"iteration {self._iteration}: no copies are made any more: {copied.problem}")
            return
        if not self._has_told:
            where = "" if self.copies.neighbours is None else ", and those of each node on its neighbour"
            seconds = f"{copied.drain_s:.1f} s"
            _say(rank, f"iteration {self._iteration} copied to {self.copies.parent}{where}, in {seconds}")
            self._has_told = True
        if self.metrics is not None:
            row = copied_row(
                self.attempt,
                self._iteration,
                copied.size,
                stage_s=copied.stage_s,
                wait_s=wait_s,
                drain_s=copied.drain_s,
            )
            self.metrics.append_of_save(row)


def _say(rank: int, line: str) -> None:
    if rank == 0:
        print(line, flush=True)

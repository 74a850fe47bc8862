"""Checks of each step of a training loop: not finite, a spike of the loss, or passed over; and what follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainer.checkpoint.directory import LATEST
from trainer.distributed.collectives import sum_over_ranks
from trainer.process.failure import PeerFailedError
from trainer.process.metrics import spike_row
from trainer.training.soundness.loss_spikes import LossSpikeError, LossSpikes, RollBackError, Spike
from trainer.training.soundness.passed_over import FILE, PassedOver, read_passed_over, write_passed_over
from trainer.training.soundness.replay import find_origin
from trainer.training.soundness.skipped_steps import NonFiniteError, SkippedSteps

if TYPE_CHECKING:
    import torch

    from trainer.config.train_config import TrainConfig
    from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer, StepOutcome
    from trainer.parallel_model import ParallelModel
    from trainer.process.heartbeat import Heartbeat
    from trainer.process.progress import TrainingProgress
    from trainer.training.row_output import RowOutput
    from trainer.training.saving import Saving

_CURE = (
    "Lower optimizer.lr or look at the samples, then resume; or set training.on_loss_spike to roll_back, which passes "
    "over them, or to skip"
)


@dataclass
class StepChecks:
    """One rank's checks. All methods are collective: all ranks, at the same iteration.

    Attributes:
        progress: of the run; its recent losses are those that a loss is judged by.
        saving: of the loop, whose newest save a run is rolled back to.
        metrics: takes the rows of rank 0; None elsewhere.
    """

    config: TrainConfig
    model: ParallelModel
    optimizer: MixedPrecisionOptimizer
    progress: TrainingProgress
    saving: Saving
    heartbeat: Heartbeat
    device: torch.device
    metrics: RowOutput | None
    attempt: int
    _skipped: SkippedSteps = field(init=False)
    _spikes: LossSpikes = field(init=False)
    _listed: frozenset[int] = field(init=False)
    _ranges: list[PassedOver] = field(default_factory=list)
    _origin: str = ""
    _last_spike: int | None = None

    def __post_init__(self) -> None:
        training = self.config.training
        self._skipped = SkippedSteps(training.max_skipped_steps, training.skipped_steps_window)
        self._spikes = LossSpikes(training.loss_spike_factor, training.loss_spike_window, self.progress.recent_losses)
        self._listed = frozenset(training.iterations_to_skip)

    @property
    def bad_in_a_row(self) -> int:
        """Steps since the last finite one."""
        return self._skipped.in_a_row

    def begin(self) -> None:
        """Read the iterations that earlier attempts were rolled back from.

        Raises:
            CheckpointError, PeerFailedError: see read_passed_over.
        """
        root = self.saving.writer.root if self.saving.writer is not None else None
        self._ranges = read_passed_over(root, self.model.mesh.rank, self.device)

    def passes_over(self, iteration: int) -> bool:
        """True if this iteration makes no step."""
        return iteration in self._listed or any(each.first <= iteration <= each.last for each in self._ranges)

    def holds_back(self, own_losses: Callable[[], Sequence[float]], labels: Mapping[str, int]) -> bool:
        """True if the next step's loss is a spike, and the config asks to make no step of it.

        Args:
            own_losses: gives this rank's share of the sum of each term of the loss.
            labels: of the whole batch, by term.
        """
        if self.config.training.on_loss_spike != "skip":
            return False
        total, count = sum_over_ranks(own_losses(), self.device)[0], next(iter(labels.values()))
        return count > 0 and self._spikes.judge(self.progress.iteration + 1, total / count) is not None

    def check(
        self,
        outcome: StepOutcome,
        loss_scale: float,
        losses: Mapping[str, tuple[float, int]],
        own_losses: Callable[[], Sequence[float]],
        compute: Callable[[], Sequence[float]],
    ) -> None:
        """Check the newest step.

        Args:
            outcome: of its optimizer step.
            loss_scale: of the step.
            losses: sum over the global batch and number of labels of each term.
            own_losses: gives this rank's share of those sums.
            compute: repeats forward and backward of the step, and gives the share again.

        Raises:
            NonFiniteError: on rank 0, too many steps were skipped.
            LossSpikeError, RollBackError: on rank 0, the loss is a spike that ends the attempt.
            PeerFailedError: the same on all other ranks.
        """
        if not self._searches_scale(outcome, loss_scale):
            is_bad = outcome.skipped and not outcome.held
            if is_bad and not self._skipped.in_a_row and self.config.training.replay_skipped_steps:
                self.heartbeat.beat(self.progress.iteration, "replay")
                self._origin = find_origin(self.model, self.progress.iteration, compute, own_losses(), self.device)
                self._say(self._origin)
            self._count_skipped(is_bad, all(math.isfinite(total) for total, _ in losses.values()))
        total, count = next(iter(losses.values()))
        if self.config.training.on_loss_spike != "nothing" and count:
            self._check_spike(total / count)

    def _searches_scale(self, outcome: StepOutcome, loss_scale: float) -> bool:
        """True if the step was skipped to find the loss scale: fp16 begins with some twenty, which halve it."""
        scaler = self.optimizer.loss_scaler
        return outcome.skipped and not outcome.held and (scaler.scale < loss_scale or scaler.can_fall)

    def _count_skipped(self, is_bad: bool, is_number: bool) -> None:
        """Count the skipped steps, and those without a finite loss.

        At the last step, a run whose newest losses are all not finite has nothing to show.
        """
        self._skipped.add(is_bad or not is_number)
        is_last = self.progress.iteration >= self.config.training.train_iters
        steps = self._skipped.excess or (self._skipped.all_of_them if is_last and not is_number else "")
        if not steps:
            return
        # What is being written is older than these steps, and worth its end.
        self.saving.wait()
        if self.model.mesh.rank != 0:
            raise PeerFailedError("losses or gradients are not finite: rank 0 reports it")
        root = self.saving.writer.root if self.saving.writer is not None else None
        raise NonFiniteError(steps, self.progress.iteration, root, self._origin)

    def _check_spike(self, loss: float) -> None:
        """Judge a step's loss, tell of the first spike of several in a row, and end the attempt if so asked."""
        iteration = self.progress.iteration
        spike = self._spikes.judge(iteration, loss)
        self._spikes.add(loss)
        if spike is None:
            return
        is_first, self._last_spike = self._last_spike != iteration - 1, iteration
        policy = self.config.training.on_loss_spike
        if self.metrics is not None:
            self.metrics.append_of_save(spike_row(self.attempt, iteration, loss, spike.median))
        if is_first or policy == "skip":
            self._say(f"{spike}{'; no step was made of it' if policy == 'skip' else ''}")
        if policy in ("stop", "roll_back"):
            self._end(spike)

    def _end(self, spike: Spike) -> None:
        """End the attempt at a spike; with roll_back, record first what the next one passes over."""
        # A save that is being written is older than the spike.
        self.saving.finish()
        if self.model.mesh.rank != 0:
            raise PeerFailedError("the loss is a spike: rank 0 reports it")
        saved, root = self.saving.saved_iteration or 0, self.saving.writer.root if self.saving.writer else None
        if self.config.training.on_loss_spike == "stop" or root is None:
            raise LossSpikeError(f"{spike}; {_newest(saved)}. {_CURE}")
        earlier = self._ranges[-1] if self._ranges else None
        if earlier is not None and spike.iteration - earlier.last <= self.config.training.loss_spike_window:
            raise LossSpikeError(
                f"{spike}, soon after iterations {earlier.first} to {earlier.last}, which the run has passed over: the "
                f"weights may have been bad before. Write the iteration of an older checkpoint into {root / LATEST}, "
                "or lower optimizer.lr, then resume"
            )
        bad = PassedOver(saved + 1, spike.iteration)
        write_passed_over(root, [*self._ranges, bad])
        raise RollBackError(
            f"{spike}; {_newest(saved)}, and the next attempt begins there and passes over iterations {bad.first} to "
            f"{bad.last}, as {root / FILE} records"
        )

    def _say(self, line: str) -> None:
        if self.model.mesh.rank == 0:
            print(line, flush=True)


def _newest(saved: int) -> str:
    return f"the newest checkpoint is that of iteration {saved}" if saved else "nothing is saved yet"

"""The training loop: iterations, logging, evaluation and checkpoints.

The loop ends at completion or a stop request.

Legend of phases in the heartbeat: data, forward and backward, optimizer, agreement, replay, logging, hooks, evaluation,
checkpoint, export.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch

from trainer.distributed.collectives import max_over_ranks, sum_over_ranks
from trainer.distributed.random_streams import StepRandomness
from trainer.distributed.step_timers import StepTimers
from trainer.pipeline.executor import forward_backward
from trainer.process.device import peak_memory_bytes
from trainer.process.failure import PeerFailedError
from trainer.process.metrics import (
    SpeedScale,
    tasks_line,
    tasks_row,
    training_line,
    training_row,
    validation_line,
    validation_row,
)
from trainer.training.busy_share import busy_shares
from trainer.training.global_batches import GlobalBatches
from trainer.training.interval import Interval
from trainer.training.lost_lock import check_lock, end_lost_run
from trainer.training.saving import Saving
from trainer.training.soundness.replay import find_origin
from trainer.training.soundness.skipped_steps import NonFiniteError, SkippedSteps
from trainer.training.soundness.weight_hashes import compare_replicas
from trainer.training.step_hooks import StepHooks
from trainer.training.step_numbers import StepNumbers
from trainer.training.training_lines import TrainingLines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.checkpoint.save import CheckpointWriter
    from trainer.config.train_config import TrainConfig
    from trainer.data.loading.loader import BatchLoader
    from trainer.data.samples.micro_batch import MicroBatch
    from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer, StepOutcome
    from trainer.parallel_model import ParallelModel
    from trainer.process.heartbeat import Heartbeat
    from trainer.process.progress import TrainingProgress
    from trainer.process.run_lock import RunLock
    from trainer.process.stop import StopRequest
    from trainer.training.kernel_build import KernelSwitch
    from trainer.training.row_output import RowOutput
    from trainer.training.task_evaluation import TaskEvaluation

Ending = Literal["completed", "stopped"]
Losses = dict[str, tuple[float, int]]
"""Term of the loss -> sum over the global batch, and number of labels."""


@dataclass
class TrainingLoop:
    """One rank's training loop. Every rank runs the same loop; all methods are collective.

    Attributes:
        writer: None disables saving.
        tasks: evaluated while training; None without.
        metrics: on global rank 0, else None.
        lock: on global rank 0 of a run with a directory, else None.
        saved_iteration: iteration of an existing checkpoint, which is not written again.
        switch: to kernels that are being built; None without, and after it.
    """

    config: TrainConfig
    model: ParallelModel
    optimizer: MixedPrecisionOptimizer
    data: BatchLoader
    progress: TrainingProgress
    speed: SpeedScale
    stop: StopRequest
    heartbeat: Heartbeat
    device: torch.device
    writer: CheckpointWriter | None = None
    tasks: TaskEvaluation | None = None
    metrics: RowOutput | None = None
    lock: RunLock | None = None
    attempt: int = 1
    saved_iteration: int | None = None
    switch: KernelSwitch | None = None
    _saving: Saving = field(init=False)
    _skipped_steps: SkippedSteps = field(init=False)
    _lines: TrainingLines = field(init=False)
    _timers: StepTimers = field(init=False)
    _numbers: StepNumbers = field(init=False)
    _hooks: StepHooks = field(init=False)
    _batches: GlobalBatches = field(init=False)
    _save_is_due: bool = False
    _origin: str = ""
    _began: float = field(default_factory=time.perf_counter)
    _interval: Interval = field(default_factory=Interval)

    def __post_init__(self) -> None:
        training = self.config.training
        self._skipped_steps = SkippedSteps(training.max_skipped_steps, training.skipped_steps_window)
        self._lines = TrainingLines(self.config.logging.log_interval)
        self._batches = GlobalBatches(self.config, self.model, self.data, self.device)
        self._timers = StepTimers(self.config.logging, self.device)
        self._numbers = StepNumbers(self.config, self.model, self.optimizer)
        self._hooks = StepHooks(self.config, self.model)
        self._saving = Saving(
            config=self.config.checkpoint,
            model=self.model,
            optimizer=self.optimizer,
            data=self.data,
            progress=self.progress,
            heartbeat=self.heartbeat,
            device=self.device,
            writer=self.writer,
            lock=self.lock,
            attempt=self.attempt,
            saved_iteration=self.saved_iteration,
            before_save=self._hooks.before_save,
            metrics=self.metrics,
        )

    def run(self) -> Ending:
        """Train until train_iters or a stop request, then save.

        Raises:
            CheckpointError: too many checkpoints in a row could not be written, or the last one.
            NonFiniteError: on rank 0, too many steps were skipped.
            LostLockError: on rank 0, another process has taken the run over.
            ReplicaError: on one rank, replicas hold different weights.
            PeerFailedError: another rank reports one of these.
        """
        with busy_shares(self.heartbeat, self.device):
            return self._train()

    def _train(self) -> Ending:
        training, checkpoint = self.config.training, self.config.checkpoint
        evaluated, is_stopped = -1, False
        self._saving.reserve()
        self.heartbeat.begin_training(self.progress.iteration, self.model.mesh.pp_rank)
        while self.progress.iteration < training.train_iters and not is_stopped:
            is_asked = self._iterate()
            iteration = self.progress.iteration
            is_stopped = is_asked or self._is_exit(iteration)
            if is_stopped:
                self._save(is_last=True)
            # The sender of a stop request may send SIGKILL before an evaluation would end.
            if not is_asked and iteration % training.eval_interval == 0:
                self._evaluate()
                evaluated = iteration
            if not is_asked and self.tasks is not None and self.tasks.is_due(iteration):
                self._evaluate_tasks(self.tasks)
            if checkpoint.save_interval is not None and iteration % checkpoint.save_interval == 0:
                self._save_is_due = True
            # Weights after which no gradient is finite are not worth a save that replaces a good one.
            if self._save_is_due and not self._skipped_steps.in_a_row and not is_stopped:
                self._save()
        if self.progress.iteration >= training.train_iters:
            # Before the save: a kill between the two must not lose the last evaluation.
            if evaluated != self.progress.iteration:
                self._evaluate()
            if self.tasks is not None and not self.tasks.is_due(self.progress.iteration):
                self._evaluate_tasks(self.tasks)
            is_stopped = False
        self._save(is_last=True)
        check_lock(self.lock, self.device)
        return "stopped" if is_stopped else "completed"

    def _iterate(self) -> bool:
        """Make one optimizer step; True if any rank has a stop request."""
        began = time.perf_counter()
        progress, training = self.progress, self.config.training
        self._beat("data")
        with self._timers.measure("data"):
            micro_batches, own_counts = self._batches.read("train", progress.consumed_samples)
            samples = self._batches.sizes.at(progress.consumed_samples)
            labels = self._batches.labels(own_counts, samples)
        # A batch without valid tokens has loss 0 and gradient 0, whatever the divisor.
        divisors = [max(1, count) for count in labels.values()]
        self._beat("forward and backward")
        with self._timers.measure("forward_backward"):
            loss = self._forward_backward(micro_batches, divisors, progress.iteration)
        self._beat("optimizer")
        place = self._batches.schedule_step(progress)
        lr = self._hooks.set_rates(self.optimizer, progress.optimizer_steps, place)
        loss_scale = self.optimizer.loss_scaler.scale
        self._numbers.read(progress.iteration + 1)
        with self._timers.measure("optimizer"):
            outcome = self.optimizer.step(lr)
        self.model.move_expert_biases(was_skipped=outcome.skipped)
        self._beat("agreement")
        losses, is_stopped, switches, has_drained = self._agree(outcome, loss, labels, samples)
        self._hooks.note_step(progress.iteration, losses, lr, outcome, micro_batches)
        self._interval.add(time.perf_counter() - began, samples)
        compare_replicas(self.model, training, progress.iteration, self.device)
        is_whole = progress.iteration % (self.config.logging.log_interval or 1) == 0
        is_last = is_stopped or progress.iteration >= training.train_iters or self._is_exit(progress.iteration)
        if is_whole or is_last:
            self._log(outcome, lr, loss_scale, is_last=is_last)
        if is_whole:
            # A resume continues a short last interval, and so logs the rows of an uninterrupted run.
            progress.begin_interval()
            self._interval.begin()
            self._timers.begin_interval()
        searches = self._searches_scale(outcome, loss_scale)
        if outcome.skipped and not searches and not self._skipped_steps.in_a_row:
            self._find_origin(micro_batches, divisors, labels, loss)
        if not searches:
            self._count_skipped(outcome, all(math.isfinite(total) for total, _ in losses.values()))
        if self._hooks.follow_steps:
            self._beat("hooks")
            self._hooks.after_step()
        if switches and self.switch is not None and not is_last:
            self._beat("switching the kernels")
            self._saving.writer, lines = self.switch.make(progress.iteration, self._saving.writer)
            self.switch = None
            self._say("\n".join(lines))
        if has_drained:
            self._saving.finish()
        return is_stopped

    def _agree(
        self, outcome: StepOutcome, loss: torch.Tensor, labels: dict[str, int], samples: int
    ) -> tuple[Losses, bool, bool, bool]:
        """Count the iteration of ``samples``, with the number of labels of each term of its loss.

        Returns:
            Its losses, True if any rank has a stop request, True if any has its kernels, and True if all have drained
            a save: the same on every rank.
        """
        is_lost = self.lock is not None and self.lock.is_known_lost
        has_kernels = self.switch is not None and self.switch.following.have_ended
        flags = [float(self._is_to_stop()), float(is_lost), float(has_kernels), float(self._saving.has_drained)]
        own, further = self._batches.own_losses(loss, len(labels)), self.model.take_further_losses()
        totals = sum_over_ranks([*own, *chain.from_iterable(further.values()), *flags], self.device)
        sums, (stops, lost, switches, drained) = totals[: len(own)], totals[-len(flags) :]
        if lost:
            end_lost_run(self.lock)
        losses = dict(zip(labels, zip(sums, labels.values(), strict=True), strict=True))
        self._count(outcome, losses, samples)
        for name, total, count in zip(further, totals[len(own) :: 2], totals[len(own) + 1 :: 2], strict=False):
            if math.isfinite(total):
                self.progress.add_further_loss(name, total, count)
        return losses, stops > 0.0, switches > 0.0, drained == self.model.mesh.world_size

    def _is_exit(self, iteration: int) -> bool:
        """True if exit_interval ends the run after this iteration."""
        interval = self.config.training.exit_interval
        return interval is not None and iteration % interval == 0

    def _is_to_stop(self) -> bool:
        """True if this rank has a stop request, or has trained for exit_duration_in_mins."""
        limit = self.config.training.exit_duration_in_mins
        return self.stop.is_made() or (limit is not None and time.perf_counter() - self._began > 60.0 * limit)

    def _searches_scale(self, outcome: StepOutcome, loss_scale: float) -> bool:
        """True if the step was skipped to find the loss scale: fp16 begins with some twenty, which halve it."""
        scaler = self.optimizer.loss_scaler
        return outcome.skipped and (scaler.scale < loss_scale or scaler.can_fall)

    def _find_origin(
        self, micro_batches: Sequence[MicroBatch], divisors: Sequence[int], labels: dict[str, int], loss: torch.Tensor
    ) -> None:
        """Compute the newest step, which was skipped, again, and tell where it was not finite first."""
        if not self.config.training.replay_skipped_steps:
            return
        self._beat("replay")
        iteration, own = self.progress.iteration, self._batches.own_losses(loss, len(labels))

        def compute() -> list[float]:
            losses = self._forward_backward(micro_batches, divisors, iteration - 1)
            self.model.take_further_losses()
            return self._batches.own_losses(losses, len(labels))

        self._origin = find_origin(self.model, iteration, compute, own, self.device)
        self._say(self._origin)

    def _forward_backward(
        self, micro_batches: Sequence[MicroBatch], divisors: Sequence[int], iteration: int
    ) -> torch.Tensor:
        """Sums of this rank's losses, and the main gradients, of the step after ``iteration``."""
        return forward_backward(
            self.model,
            micro_batches,
            valid_tokens=divisors if len(divisors) > 1 else divisors[0],
            loss_scale=self.optimizer.loss_scaler.scale,
            randomness=StepRandomness(self.progress.seed, iteration),
            timers=self._timers,
        )

    def _count_skipped(self, outcome: StepOutcome, is_number: bool) -> None:
        """Count the skipped steps, and those without a finite loss.

        At the last step, a run whose newest losses are all not finite has nothing to show.

        Raises:
            NonFiniteError: on rank 0, there are too many.
            PeerFailedError: the same on all other ranks.
        """
        self._skipped_steps.add(outcome.skipped or not is_number)
        is_last = self.progress.iteration >= self.config.training.train_iters
        steps = self._skipped_steps.excess or (self._skipped_steps.all_of_them if is_last and not is_number else "")
        if not steps:
            return
        # What is being written is older than these steps, and worth its end.
        self._saving.wait()
        if self.model.mesh.rank != 0:
            raise PeerFailedError("losses or gradients are not finite: rank 0 reports it")
        root = self.writer.root if self.writer is not None else None
        raise NonFiniteError(steps, self.progress.iteration, root, self._origin)

    def _count(self, outcome: StepOutcome, losses: Losses, samples: int) -> None:
        """Count an iteration of ``samples`` with its losses."""
        progress = self.progress
        progress.iteration += 1
        progress.consumed_samples += samples
        progress.consumed_tokens += samples * self.config.tokens_per_sample
        progress.interval_iterations += 1
        is_number = all(math.isfinite(loss_sum) for loss_sum, _ in losses.values())
        if is_number:
            progress.add_losses(losses)
        progress.skipped_samples += samples if outcome.skipped or not is_number else 0
        if outcome.skipped and self.config.training.fp16:
            progress.skipped_iterations += 1
        elif outcome.skipped or not is_number:
            progress.nan_iterations += 1

    def _log(self, outcome: StepOutcome, lr: float, loss_scale: float, *, is_last: bool) -> None:
        self._beat("logging")
        own_peak = peak_memory_bytes(self.device)
        self.heartbeat.note_memory(own_peak)
        peak = max_over_ranks([float(own_peak)], self.device)[0]
        interval, count = self._interval, self._interval.iterations
        row = training_row(
            self.attempt,
            self.progress,
            replace(self.speed, tokens_per_iteration=interval.samples * self.config.tokens_per_sample / count),
            grad_norm=outcome.grad_norm,
            learning_rate=lr,
            loss_scale=loss_scale,
            iteration_time_s=interval.time_s / count,
            peak_memory_bytes=int(peak),
        )
        row |= self._numbers.row(self.progress.iteration, loss_scale, interval.last_samples) | self._timers.row(count)
        row |= self._hooks.row(self.device)
        self._append(row)
        line = self._lines.next_line(row, is_last=is_last) if self.model.mesh.rank == 0 else None
        if line is not None:
            self._say(training_line(line, self.config.training.train_iters))

    def _evaluate(self) -> None:
        """Log the mean loss over eval_iters batches of the valid split.

        Every evaluation uses the same global batches.
        """
        training = self.config.training
        if not training.eval_iters or not self.data.has("valid"):
            return
        self._beat("evaluation")
        (_, mean), *others = self._batches.evaluate(training.eval_iters).items()
        row = validation_row(self.attempt, self.progress.iteration, mean, dict(others))
        self._append(row)
        self._say(validation_line(row, training.train_iters))

    def _evaluate_tasks(self, tasks: TaskEvaluation) -> None:
        """Log the metrics of all tasks."""
        metrics = tasks.run(self.model, self.device, lambda: self._beat("evaluation"))
        if self.model.mesh.rank != 0:
            return
        row = tasks_row(self.attempt, self.progress.iteration, metrics)
        self._append(row)
        self._say(tasks_line(row, self.config.training.train_iters))

    def _save(self, *, is_last: bool = False) -> None:
        """Save, unless this iteration is saved; see Saving.save."""
        self._saving.save(is_good=not self._skipped_steps.in_a_row, is_last=is_last)
        self._save_is_due = False

    def _append(self, row: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.append(row, self._interval.last_samples)

    def _beat(self, phase: str) -> None:
        self.heartbeat.beat(self.progress.iteration, phase)

    def _say(self, line: str) -> None:
        if self.model.mesh.rank == 0:
            print(line, flush=True)

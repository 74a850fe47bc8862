"""The training loop: iterations, logging, evaluation and checkpoints.

The loop ends at completion or a stop request.

Legend of phases in the heartbeat: data, forward and backward, optimizer, agreement, replay, logging, hooks, evaluation,
checkpoint, export.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch

from trainer.distributed.collectives import max_over_ranks
from trainer.distributed.random_streams import StepRandomness
from trainer.distributed.step_timers import StepTimers
from trainer.pipeline.executor import forward_backward
from trainer.process.device import peak_memory_bytes
from trainer.process.garbage import GarbageCollector
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
from trainer.training.polling import Requests, check_lock, poll
from trainer.training.profile.step_profile import StepProfile
from trainer.training.saving import Saving
from trainer.training.soundness.step_checks import StepChecks
from trainer.training.soundness.weight_hashes import compare_replicas
from trainer.training.step_hooks import StepHooks
from trainer.training.step_numbers import StepNumbers
from trainer.training.training_lines import TrainingLines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.checkpoint.copies.state_copies import StateCopies
    from trainer.checkpoint.save import CheckpointWriter
    from trainer.config.train_config import TrainConfig
    from trainer.data.loading.loader import BatchLoader
    from trainer.data.samples.micro_batch import MicroBatch
    from trainer.optimizer.mixed_precision import LaunchedStep, MixedPrecisionOptimizer, StepOutcome
    from trainer.parallel_model import ParallelModel
    from trainer.process.heartbeat import Heartbeat
    from trainer.process.progress import Skip, TrainingProgress
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
        copies: of the state on the nodes; None without.
        profile: of a few iterations.
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
    copies: StateCopies | None = None
    profile: StepProfile = field(default_factory=StepProfile.none)
    _saving: Saving = field(init=False)
    _checks: StepChecks = field(init=False)
    _lines: TrainingLines = field(init=False)
    _timers: StepTimers = field(init=False)
    _numbers: StepNumbers = field(init=False)
    _hooks: StepHooks = field(init=False)
    _batches: GlobalBatches = field(init=False)
    _garbage: GarbageCollector = field(init=False)
    _save_is_due: bool = False
    _began: float = field(default_factory=time.perf_counter)
    _interval: Interval = field(default_factory=Interval)

    def __post_init__(self) -> None:
        self._lines = TrainingLines(self.config.logging.log_interval)
        self._batches = GlobalBatches(self.config, self.model, self.data, self.device)
        self._timers = StepTimers(self.config.logging, self.device)
        self._numbers = StepNumbers(self.config, self.model, self.optimizer)
        self._hooks = StepHooks(self.config, self.model)
        self._garbage = GarbageCollector.build(self.config.training)
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
            copies=self.copies,
        )
        self._checks = StepChecks(
            config=self.config,
            model=self.model,
            optimizer=self.optimizer,
            progress=self.progress,
            saving=self._saving,
            heartbeat=self.heartbeat,
            device=self.device,
            metrics=self.metrics,
            attempt=self.attempt,
        )

    def run(self) -> Ending:
        """Train until train_iters or a stop request, then save.

        Raises:
            CheckpointError: too many checkpoints in a row could not be written, or the last one.
            NonFiniteError: on rank 0, too many steps were skipped.
            LossSpikeError, RollBackError: on rank 0, the loss is a spike that ends the attempt.
            LostLockError: on rank 0, another process has taken the run over.
            ReplicaError: on one rank, replicas hold different weights.
            PeerFailedError: another rank reports one of these.
        """
        with busy_shares(self.heartbeat, self.device), self.profile, self._garbage:
            return self._train()

    def _train(self) -> Ending:
        training, checkpoint = self.config.training, self.config.checkpoint
        evaluated, is_stopped = -1, False
        self._saving.reserve()
        self._checks.begin()
        self.heartbeat.begin_training(self.progress.iteration, self.model.mesh.pp_rank)
        while self.progress.iteration < training.train_iters and not is_stopped:
            with self.profile.step(self.progress.iteration + 1, self._timers, self._beat):
                is_asked = self._iterate()
            iteration = self.progress.iteration
            self._garbage.after_step(iteration)
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
            if self._save_is_due and not self._checks.bad_in_a_row and not is_stopped:
                self._save()
            self._saving.copy(skips=self._checks.bad_in_a_row > 0 or is_stopped or iteration >= training.train_iters)
        if self.progress.iteration >= training.train_iters:
            # Before the save: a kill between the two must not lose the last evaluation.
            if evaluated != self.progress.iteration:
                self._evaluate()
            if self.tasks is not None and not self.tasks.is_due(self.progress.iteration):
                self._evaluate_tasks(self.tasks)
            is_stopped = False
        self._save(is_last=True)
        check_lock(self.lock, self.device)
        self._saving.end_copies()
        return "stopped" if is_stopped else "completed"

    def _iterate(self) -> bool:
        """Make one optimizer step; True if any rank has a stop request."""
        began = time.perf_counter()
        progress = self.progress
        if self._checks.passes_over(progress.iteration + 1):
            return self._pass_over()
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
        own_losses = partial(self._batches.own_losses, loss, len(labels))
        is_held = self._checks.holds_back(own_losses, labels)
        with self._timers.measure("optimizer"):
            launched = self.optimizer.hold_back() if is_held else self.optimizer.launch(lr)
        self._beat("agreement")
        outcome, losses, polled = self._agree(launched, loss, labels, samples)
        self.model.move_expert_biases(was_skipped=outcome.skipped)
        self._hooks.note_step(progress.iteration, losses, lr, outcome, micro_batches)
        self._interval.add(time.perf_counter() - began, samples)
        compare_replicas(self.model, self.config.training, progress.iteration, self.device)
        is_whole = progress.iteration % (self.config.logging.log_interval or 1) == 0
        is_last = (
            polled.stops or progress.iteration >= self.config.training.train_iters or self._is_exit(progress.iteration)
        )
        if is_whole or is_last:
            self._log(outcome, lr, loss_scale, is_last=is_last)
        if is_whole:
            # A resume continues a short last interval, and so logs the rows of an uninterrupted run.
            progress.begin_interval()
            self._interval.begin()
            self._timers.begin_interval()
        repeat = partial(self._repeat, micro_batches, divisors)
        self._checks.check(outcome, loss_scale, losses, own_losses, repeat)
        if self._hooks.follow_steps:
            self._beat("hooks")
            self._hooks.after_step()
        if polled.switches and self.switch is not None and not is_last:
            self._beat("switching the kernels")
            self._saving.writer, lines = self.switch.make(progress.iteration, self._saving.writer)
            self.switch = None
            self._say("\n".join(lines))
        if polled.drained:
            self._saving.finish()
        return polled.stops

    def _pass_over(self) -> bool:
        """Count the next iteration, and its samples, without a step; True if any rank has a stop request."""
        progress = self.progress
        self._beat("data")
        # A stream of text has no other way past its samples.
        self._batches.read("train", progress.consumed_samples)
        samples = self._batches.sizes.at(progress.consumed_samples)
        progress.pass_over(samples, samples * self.config.tokens_per_sample)
        self._say(f"iteration {progress.iteration}: its {samples} samples are passed over")
        nothing = torch.zeros(0, dtype=torch.float64, device=self.device)
        _, _, polled = poll(self._requests(), self.lock, nothing, nothing)
        if polled.drained:
            self._saving.finish()
        return polled.stops

    def _agree(
        self, launched: LaunchedStep, loss: torch.Tensor, labels: dict[str, int], samples: int
    ) -> tuple[StepOutcome, Losses, Requests]:
        """Read the outcome of the step and its losses, and count the iteration of ``samples``.

        The only wait for the device of an iteration without further losses and experts, after all its launches.
        """
        own, further = self._batches.own_sums(loss, len(labels)), self.model.take_further_losses()
        others = torch.tensor([*chain.from_iterable(further.values())], dtype=torch.float64)
        sums = torch.cat([own, others.to(self.device, non_blocking=True)])
        totals, (norm,), polled = poll(self._requests(), self.lock, sums, launched.norm.view(1))
        outcome = self.optimizer.finish(launched, norm)
        losses = dict(zip(labels, zip(totals[: len(labels)], labels.values(), strict=True), strict=True))
        skip: Skip | None = (
            ("wanted" if outcome.held or self.config.training.fp16 else "bad") if outcome.skipped else None
        )
        self.progress.count(samples, samples * self.config.tokens_per_sample, losses, skip)
        for name, total, count in zip(further, totals[len(labels) :: 2], totals[len(labels) + 1 :: 2], strict=True):
            if math.isfinite(total):
                self.progress.add_further_loss(name, total, count)
        return outcome, losses, polled

    def _requests(self) -> Requests:
        has_kernels = self.switch is not None and self.switch.following.have_ended
        return Requests(self._is_to_stop(), has_kernels, self._saving.has_drained)

    def _is_exit(self, iteration: int) -> bool:
        """True if exit_interval ends the run after this iteration."""
        interval = self.config.training.exit_interval
        return interval is not None and iteration % interval == 0

    def _is_to_stop(self) -> bool:
        """True if this rank has a stop request, or has trained for exit_duration_in_mins."""
        limit = self.config.training.exit_duration_in_mins
        return self.stop.is_made() or (limit is not None and time.perf_counter() - self._began > 60.0 * limit)

    def _repeat(self, micro_batches: Sequence[MicroBatch], divisors: Sequence[int]) -> list[float]:
        """This rank's sums of losses of the newest step, computed again."""
        losses = self._forward_backward(micro_batches, divisors, self.progress.iteration - 1)
        self.model.take_further_losses()
        return self._batches.own_losses(losses, len(divisors))

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
        with self._garbage.beside_evaluation():
            (_, mean), *others = self._batches.evaluate(training.eval_iters).items()
        row = validation_row(self.attempt, self.progress.iteration, mean, dict(others))
        self._append(row)
        self._say(validation_line(row, training.train_iters))

    def _evaluate_tasks(self, tasks: TaskEvaluation) -> None:
        """Log the metrics of all tasks."""
        with self._garbage.beside_evaluation():
            metrics = tasks.run(self.model, self.device, lambda: self._beat("evaluation"))
        if self.model.mesh.rank != 0:
            return
        row = tasks_row(self.attempt, self.progress.iteration, metrics)
        self._append(row)
        self._say(tasks_line(row, self.config.training.train_iters))

    def _save(self, *, is_last: bool = False) -> None:
        """Save, unless this iteration is saved; see Saving.save."""
        self._saving.save(is_good=not self._checks.bad_in_a_row, is_last=is_last)
        self._save_is_due = False

    def _append(self, row: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.append(row, self._interval.last_samples)

    def _beat(self, phase: str) -> None:
        self.heartbeat.beat(self.progress.iteration, phase)

    def _say(self, line: str) -> None:
        if self.model.mesh.rank == 0:
            print(line, flush=True)

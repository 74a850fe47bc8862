"""The training loop: iterations, logging, evaluation and checkpoints.

The loop ends at completion or a stop request.

Legend of phases in the heartbeat: data, forward and backward, optimizer, agreement, logging, evaluation, checkpoint.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from trainer.distributed.collectives import max_over_ranks, sum_over_ranks
from trainer.distributed.random_streams import StepRandomness
from trainer.optimizer.learning_rate import learning_rate
from trainer.pipeline.executor import forward_backward, forward_only
from trainer.process.device import peak_memory_bytes
from trainer.process.metrics import (
    MetricsFile,
    SpeedScale,
    training_line,
    training_row,
    validation_line,
    validation_row,
)

if TYPE_CHECKING:
    from trainer.checkpoint.save import CheckpointWriter
    from trainer.config.train_config import TrainConfig
    from trainer.data.loading.loader import BatchLoader
    from trainer.data.samples.batches import MicroBatch, Split
    from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer, StepOutcome
    from trainer.parallel_model import ParallelModel
    from trainer.process.heartbeat import Heartbeat
    from trainer.process.progress import TrainingProgress
    from trainer.process.stop import StopRequest

Ending = Literal["completed", "stopped"]


@dataclass
class TrainingLoop:
    """One rank's training loop. Every rank runs the same loop; all methods are collective.

    Attributes:
        writer: None disables saving.
        metrics: on global rank 0 of a run with a directory, else None.
        saved_iteration: iteration of an existing checkpoint, which is not written again.
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
    metrics: MetricsFile | None = None
    attempt: int = 1
    saved_iteration: int | None = None
    _began: float = field(default_factory=time.perf_counter)
    _interval_time_s: float = 0.0
    _timed_iterations: int = 0

    def run(self) -> Ending:
        """Train until train_iters or a stop request, then save.

        Raises:
            CheckpointError: a checkpoint could not be written.
        """
        training, checkpoint = self.config.training, self.config.checkpoint
        evaluated = -1
        is_stopped = False
        while self.progress.iteration < training.train_iters and not is_stopped:
            is_asked = self._iterate()
            iteration = self.progress.iteration
            is_stopped = is_asked or (training.exit_interval is not None and iteration % training.exit_interval == 0)
            if is_stopped:
                self._save()
            # The sender of a stop request may send SIGKILL before an evaluation would end.
            if not is_asked and iteration % training.eval_interval == 0:
                self._evaluate()
                evaluated = iteration
            if checkpoint.save_interval is not None and iteration % checkpoint.save_interval == 0:
                self._save()
        if self.progress.iteration >= training.train_iters:
            # Before the save: a kill between the two must not lose the last evaluation.
            if evaluated != self.progress.iteration:
                self._evaluate()
            is_stopped = False
        self._save()
        return "stopped" if is_stopped else "completed"

    def _iterate(self) -> bool:
        """Make one optimizer step; True if any rank has a stop request."""
        began = time.perf_counter()
        progress, training = self.progress, self.config.training
        self._beat("data")
        micro_batches, own_tokens = self._micro_batches("train", progress.consumed_samples)
        valid_tokens = self.config.global_batch_size(self.model.mesh.dp) * training.seq_length
        if self.data.masks_loss:
            valid_tokens = int(sum_over_ranks([float(own_tokens)], self.device)[0])
        self._beat("forward and backward")
        loss = forward_backward(
            self.model,
            micro_batches,
            # A batch without valid tokens has loss 0 and gradient 0, whatever the divisor.
            valid_tokens=max(1, valid_tokens),
            loss_scale=self.optimizer.loss_scaler.scale,
            randomness=StepRandomness(progress.seed, progress.iteration),
        )
        self._beat("optimizer")
        lr = learning_rate(progress.optimizer_steps, self.config.optimizer, training.train_iters)
        loss_scale = self.optimizer.loss_scaler.scale
        outcome = self.optimizer.step(lr)
        self._beat("agreement")
        loss_sum, stops = sum_over_ranks([self._own_loss(loss), float(self.stop.is_made())], self.device)
        self._count(outcome, loss_sum, valid_tokens)
        self._interval_time_s += time.perf_counter() - began
        self._timed_iterations += 1
        if progress.iteration % self.config.logging.log_interval == 0:
            self._log(outcome, lr, loss_scale)
        return stops > 0.0

    def _own_loss(self, loss: torch.Tensor) -> float:
        # Every tp rank of the last stage has the same sum; the first of them contributes it.
        mesh = self.model.mesh
        return float(loss.item()) if mesh.computes_loss and mesh.tp_rank == 0 else 0.0

    def _count(self, outcome: StepOutcome, loss_sum: float, valid_tokens: int) -> None:
        progress, samples = self.progress, self.config.global_batch_size(self.model.mesh.dp)
        progress.iteration += 1
        progress.consumed_samples += samples
        progress.consumed_tokens += samples * self.config.training.seq_length
        progress.interval_iterations += 1
        if math.isfinite(loss_sum):
            progress.interval_loss += loss_sum
            progress.interval_tokens += valid_tokens
        if outcome.skipped and self.config.training.fp16:
            progress.skipped_iterations += 1
        elif outcome.skipped:
            progress.nan_iterations += 1

    def _log(self, outcome: StepOutcome, lr: float, loss_scale: float) -> None:
        self._beat("logging")
        peak = max_over_ranks([float(peak_memory_bytes(self.device))], self.device)[0]
        row = training_row(
            self.attempt,
            self.progress,
            self.speed,
            grad_norm=outcome.grad_norm,
            learning_rate=lr,
            loss_scale=loss_scale,
            iteration_time_s=self._interval_time_s / self._timed_iterations,
            peak_memory_bytes=int(peak),
        )
        self.progress.begin_interval()
        self._interval_time_s, self._timed_iterations = 0.0, 0
        if self.metrics is not None:
            self.metrics.append(row)
        self._say(training_line(row, self.config.training.train_iters, time.perf_counter() - self._began))

    def _evaluate(self) -> None:
        """Log the mean loss over eval_iters batches of the valid split.

        Every evaluation uses the same global batches.
        """
        training = self.config.training
        if not training.eval_iters or not self.data.has("valid"):
            return
        self._beat("evaluation")
        loss_sum, tokens = 0.0, 0
        for number in range(training.eval_iters):
            consumed = number * self.config.global_batch_size(self.model.mesh.dp)
            micro_batches, own_tokens = self._micro_batches("valid", consumed)
            loss = forward_only(self.model, micro_batches)
            loss_sum += self._own_loss(loss)
            tokens += own_tokens
        total, count = sum_over_ranks([loss_sum, float(tokens)], self.device)
        row = validation_row(self.attempt, self.progress.iteration, total / count if count else None)
        if self.metrics is not None:
            self.metrics.append(row)
        self._say(validation_line(row, training.train_iters))

    def _save(self) -> None:
        if self.writer is None or self.saved_iteration == self.progress.iteration:
            return
        self._beat("checkpoint")
        began = time.perf_counter()
        self.progress.data_state = self.data.state(self.progress.consumed_samples)
        self.writer.save(self.model, self.optimizer, self.progress)
        self.saved_iteration = self.progress.iteration
        self._say(
            f"iteration {self.progress.iteration} saved to {self.writer.root} in {time.perf_counter() - began:.1f} s"
        )

    def _micro_batches(self, split: Split, consumed_samples: int) -> tuple[list[MicroBatch], int]:
        """This replica's micro-batches, and this rank's share of the global batch's valid tokens."""
        mesh = self.model.mesh
        batches = self.data.micro_batches(split, consumed_samples)
        # All ranks of a replica read the same whole samples; the first of them contributes the count.
        speaks = mesh.tp_rank == mesh.cp_rank == mesh.pp_rank == 0
        return [batch.to(self.device) for batch in batches], sum(batch.valid_tokens for batch in batches) * speaks

    def _beat(self, phase: str) -> None:
        self.heartbeat.beat(self.progress.iteration, phase)

    def _say(self, line: str) -> None:
        if self.model.mesh.rank == 0:
            print(line, flush=True)

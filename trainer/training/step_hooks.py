"""Calls of the user's functions in the training loop. Without functions nothing is computed or sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.distributed.collectives import sum_over_ranks
from trainer.hooks.chosen import Hooks
from trainer.hooks.protocols import StepFacts
from trainer.optimizer.learning_rate import learning_rate, weight_decay

if TYPE_CHECKING:
    import torch

    from trainer.config.train_config import TrainConfig
    from trainer.data.samples.micro_batch import MicroBatch
    from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer, StepOutcome
    from trainer.parallel_model import ParallelModel


class StepHooks:
    """The user's functions, and the facts of the newest step for them."""

    def __init__(self, config: TrainConfig, model: ParallelModel) -> None:
        """Import the functions of ``config.hooks``; those of a run have been checked before."""
        self._config, self._model = config, model
        self._hooks = Hooks.load(config.hooks)
        self._facts: StepFacts | None = None

    @property
    def follow_steps(self) -> bool:
        """True if some function is called after each step."""
        return bool(self._hooks.after_step)

    def learning_rate(self, step: int, place: float) -> float:
        """Learning rate of the step that follows ``step`` earlier ones: the user's, or that of the config.

        ``place`` is that of the step in the schedule of the config; see GlobalBatches.schedule_step.
        """
        own = self._hooks.learning_rate(step, self._config)
        return learning_rate(place, self._config.optimizer, self._config.full_iters) if own is None else own

    def set_rates(self, optimizer: MixedPrecisionOptimizer, step: int, place: float) -> float:
        """Set weight decay and decoupled rate of a step; returns its rate. Arguments: see learning_rate."""
        config, full_iters = self._config.optimizer, self._config.full_iters
        optimizer.set_weight_decay(weight_decay(place, config, full_iters))
        if config.decoupled is not None:
            optimizer.set_decoupled_lr(learning_rate(place, config.decoupled, full_iters))
        return self.learning_rate(step, place)

    def note_step(
        self,
        iteration: int,
        losses: Mapping[str, tuple[float, int]],
        lr: float,
        outcome: StepOutcome,
        micro_batches: Sequence[MicroBatch],
    ) -> None:
        """Keep the facts of a step: its number, sum and labels of each term of the loss, rate, result and data."""
        if not self._hooks.read_steps:
            return
        # Weights may still be on their way from other ranks.
        self._model.gradients.wait_for_weights()
        self._facts = StepFacts(
            config=self._config,
            mesh=self._model.mesh,
            iteration=iteration,
            losses={name: total / count if count else None for name, (total, count) in losses.items()},
            learning_rate=lr,
            grad_norm=outcome.grad_norm,
            was_skipped=outcome.skipped,
            micro_batches=micro_batches,
            parameters=self._model.parameters,
        )

    def row(self, device: torch.device) -> dict[str, Any]:
        """The user's numbers for the row of the noted step. Collective: all ranks, if there are any."""
        if self._facts is None or not self._hooks.metrics:
            return {}
        totals = sum_over_ranks(self._hooks.own_sums(self._facts), device)
        means = [
            total / weight if weight else math.nan for total, weight in zip(totals[::2], totals[1::2], strict=True)
        ]
        named = zip(self._hooks.metrics, means, strict=True)
        return {"metrics": {metric.name: mean if math.isfinite(mean) else None for metric, mean in named}}

    def after_step(self) -> None:
        """Call the user's functions for the noted step."""
        for callback in self._hooks.after_step:
            callback(self._facts)

    def before_save(self) -> None:
        """Call the user's functions before a checkpoint of the noted step."""
        for callback in self._hooks.before_save:
            callback(self._facts)

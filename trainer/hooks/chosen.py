"""The user's functions of one run. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from trainer.hooks.user_function import UserFunction, load_function

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.config.sections.hooks import HooksConfig
    from trainer.config.train_config import TrainConfig
    from trainer.hooks.protocols import StepFacts


@dataclass(frozen=True)
class Hooks:
    """The functions of the section ``hooks``, imported."""

    dataset: UserFunction | None
    loss: UserFunction | None
    lr_function: UserFunction | None
    metrics: tuple[UserFunction, ...]
    after_step: tuple[UserFunction, ...]
    before_save: tuple[UserFunction, ...]

    @classmethod
    def load(cls, hooks: HooksConfig) -> Hooks:
        """Import the functions; a second call finds their modules imported.

        Raises:
            ConfigError: a function is missing, or has other parameters.
        """

        def listed(key: str) -> tuple[UserFunction, ...]:
            return tuple(load_function(f"hooks.{key}", place) for place in getattr(hooks, key))

        def single(key: str) -> UserFunction | None:
            place = getattr(hooks, key)
            return None if place is None else load_function(f"hooks.{key}", place)

        return cls(
            single("dataset_function"),
            single("loss_function"),
            single("lr_function"),
            *(listed(key) for key in ("metrics", "after_step", "before_save")),
        )

    @property
    def read_steps(self) -> bool:
        """True if some function reads the facts of steps."""
        return bool(self.metrics or self.after_step or self.before_save)

    def token_loss(self, config: TrainConfig) -> Callable[[Tensor, Tensor], Tensor] | None:
        """The user's loss as (logits [N, V], labels [N]) -> losses [N]; None without one.

        The result raises HookError if the function fails, or returns something else.
        """
        loss = self.loss
        if loss is None:
            return None

        def checked(logits: Tensor, labels: Tensor) -> Tensor:
            losses = loss(logits, labels, config)
            shape = getattr(losses, "shape", None)
            if shape != labels.shape:
                found = type(losses).__name__ if shape is None else f"the shape {list(shape)}"
                raise loss.error(f"returned {found}; a loss returns one number per label, of shape {[*labels.shape]}")
            return cast("Tensor", losses)

        return checked

    def learning_rate(self, step: int, config: TrainConfig) -> float | None:
        """The user's learning rate; None without a schedule of the user's.

        Raises:
            HookError: the function fails, or gives something else than a rate.
        """
        if self.lr_function is None:
            return None
        rate = self.lr_function(step, config)
        if not (_is_number(rate) and math.isfinite(rate) and rate >= 0.0):
            raise self.lr_function.error(f"returned {rate!r} for step {step}; a learning rate is a number from 0 on")
        return float(rate)

    def own_sums(self, facts: StepFacts) -> list[float]:
        """Sum and weight of each metric on this rank, one after another.

        Raises:
            HookError: a function fails, or returns something else.
        """
        return [number for metric in self.metrics for number in _sum_and_weight(metric, metric(facts))]


def _sum_and_weight(metric: UserFunction, found: object) -> tuple[float, float]:
    if found is None:
        return 0.0, 0.0
    if isinstance(found, tuple) and len(found) == 2 and all(map(_is_number, found)):
        return float(found[0]), float(found[1])
    raise metric.error(f"returned {found!r}; a metric returns (sum, weight) as two numbers, or None")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)

"""The learning rate as a pure function of the step. Torch-free."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config.sections import OptimizerConfig


def warmup_iters(config: OptimizerConfig, train_iters: int) -> float:
    """Steps of linear warmup; lr_warmup_fraction may give a fraction of a step."""
    if config.lr_warmup_fraction is not None:
        return config.lr_warmup_fraction * decay_iters(config, train_iters)
    return config.lr_warmup_iters


def decay_iters(config: OptimizerConfig, train_iters: int) -> int:
    """The step, counted from the start, at which the learning rate reaches min_lr."""
    return config.lr_decay_iters or train_iters


def learning_rate(step: int, config: OptimizerConfig, train_iters: int) -> float:
    """Learning rate of the optimizer step that follows ``step`` earlier ones.

    Linear warmup from lr_warmup_init to lr, then constant, linear or half a cosine down to min_lr: Megatron-LM's
    formulas (``OptimizerParamScheduler.get_lr``), so that a run moved from Megatron-LM keeps its curve. As there, the
    first step runs at lr_warmup_init, and a step skipped for an overflow does not count.
    """
    warmup, decay = warmup_iters(config, train_iters), decay_iters(config, train_iters)
    if warmup > 0 and step <= warmup:
        return config.lr_warmup_init + (config.lr - config.lr_warmup_init) * step / warmup
    if config.lr_decay_style == "constant":
        return config.lr
    if step >= decay:
        return config.min_lr
    progress = (step - warmup) / (decay - warmup)
    share = 1.0 - progress if config.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * progress) + 1.0)
    return config.min_lr + share * (config.lr - config.min_lr)

"""The learning rate as a pure function of the step. Torch-free.

With batches that grow, steps and lengths here are samples in full batches, and may be fractions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config.sections.optimizer import OptimizerConfig


def warmup_iters(config: OptimizerConfig, train_iters: float) -> float:
    """Steps of linear warmup; lr_warmup_fraction may give a fraction of a step."""
    if config.lr_warmup_fraction is not None:
        return config.lr_warmup_fraction * decay_iters(config, train_iters)
    return config.lr_warmup_iters


def decay_iters(config: OptimizerConfig, train_iters: float) -> float:
    """The step, counted from the start, at which the learning rate reaches min_lr."""
    return config.lr_decay_iters or train_iters


def learning_rate(step: float, config: OptimizerConfig, train_iters: float) -> float:
    """Learning rate of the optimizer step that follows ``step`` earlier ones.

    Linear warmup from lr_warmup_init to lr, then one of the decays to min_lr: Megatron-LM's
    formulas (``OptimizerParamScheduler.get_lr``), so that a run moved from Megatron-LM keeps its curve. As there, the
    first step runs at lr_warmup_init, and a step skipped for an overflow does not count.
    """
    warmup, decay = warmup_iters(config, train_iters), decay_iters(config, train_iters)
    if warmup > 0 and step <= warmup:
        return config.lr_warmup_init + (config.lr - config.lr_warmup_init) * step / warmup
    if config.lr_decay_style == "constant":
        return config.lr
    if config.lr_decay_style == "inverse-square-root" and step <= decay:
        return max(config.min_lr, config.lr * math.sqrt(max(warmup, 1) / max(step, 1)))
    if step >= decay:
        return config.min_lr
    if config.lr_decay_style == "WSD":
        length = config.lr_wsd_decay_iters or decay
        share = _decay_share(config.lr_wsd_decay_style, max(0.0, step - (decay - length)) / length)
    else:
        share = _decay_share(config.lr_decay_style, (step - warmup) / (decay - warmup))
    return config.min_lr + share * (config.lr - config.min_lr)


def weight_decay(step: float, config: OptimizerConfig, train_iters: float) -> float:
    """Weight decay of the optimizer step that follows ``step`` earlier ones (``OptimizerParamScheduler.get_wd``)."""
    start, end = config.start_weight_decay, config.end_weight_decay
    if config.weight_decay_incr_style == "constant" or start is None or end is None:
        return config.weight_decay
    progress = min(1.0, step / max(1, train_iters))
    return start + (1.0 - _decay_share(config.weight_decay_incr_style, progress)) * (end - start)


def _decay_share(style: str, progress: float) -> float:
    """Share of the way down that is left after ``progress`` of it: 1 at 0, and 0 at 1."""
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * progress) + 1.0)
    if style == "exponential":
        return 2.0 * math.pow(0.5, progress) - 1.0
    return 1.0 - (math.sqrt(progress) if style == "minus_sqrt" else progress)

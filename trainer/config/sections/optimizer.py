"""Section ``optimizer``: the optimizer, the learning-rate schedule and clipping."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from trainer.config.sections.section import Section


class OptimizerConfig(Section):
    """Optimizer, learning-rate schedule and gradient clipping."""

    optimizer: Literal["adam", "sgd"] = "adam"
    lr: PositiveFloat
    min_lr: NonNegativeFloat = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    lr_decay_iters: PositiveInt | PositiveFloat | None = None
    """Unset: training.train_iters. May be a fraction, after a conversion from samples or tokens."""
    lr_warmup_iters: NonNegativeInt | NonNegativeFloat = 0
    lr_warmup_fraction: float | None = Field(None, ge=0.0, le=1.0)
    """Warmup as a fraction of lr_decay_iters. Cannot be combined with lr_warmup_iters."""
    lr_warmup_init: NonNegativeFloat = 0.0
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    lr_wsd_decay_iters: PositiveInt | PositiveFloat | None = None
    """With WSD (warmup, stable, decay): iterations of the decay, the last ones before lr_decay_iters."""
    weight_decay: NonNegativeFloat = 0.01
    """Applies to matrices and tables, not to biases and norms."""
    start_weight_decay: NonNegativeFloat | None = None
    end_weight_decay: NonNegativeFloat | None = None
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """linear and cosine: from start_weight_decay to end_weight_decay over train_iters, instead of weight_decay."""
    adam_beta1: float = Field(0.9, ge=0.0, lt=1.0)
    adam_beta2: float = Field(0.999, ge=0.0, lt=1.0)
    adam_eps: PositiveFloat = 1e-8
    sgd_momentum: float = Field(0.9, ge=0.0, lt=1.0)
    clip_grad: NonNegativeFloat = 1.0
    """Largest L2 norm of the whole model's gradient; 0 disables clipping."""
    optimizer_cpu_offload: bool = False
    """Keep master weights and moments in CPU memory and run the optimizer there. Each step moves gradients to the CPU
    and weights back."""
    optimizer_offload_fraction: float = Field(1.0, ge=0.0, le=1.0)

    @property
    def moments(self) -> tuple[str, ...]:
        """Kinds of moments that the optimizer keeps: for each, one float32 number per parameter."""
        if self.optimizer == "adam":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self.sgd_momentum > 0.0 else ()

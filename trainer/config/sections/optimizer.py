"""Section ``optimizer``: the optimizer, the learning-rate schedule and clipping."""

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from trainer.config.sections.section import Section


class OptimizerConfig(Section):
    """Optimizer, learning-rate schedule and gradient clipping."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """adam: AdamW, whose decay is apart from the gradient; sgd: with momentum."""
    lr: PositiveFloat
    """Learning rate after warmup, the largest of the run."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    decoupled_lr: PositiveFloat | None = None
    """Learning rate of the word embeddings and the output layer in place of lr, with the same curve. Unset: lr."""
    decoupled_min_lr: NonNegativeFloat | None = None
    """With decoupled_lr: learning rate of the same weights at the end of the decay. Unset: min_lr."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Curve of the learning rate from lr to min_lr. WSD: constant until its decay."""
    lr_decay_iters: PositiveInt | PositiveFloat | None = None
    """Unset: training.train_iters. May be a fraction, after a conversion from samples or tokens. With
    training.rampup_batch_size this key and the others in iterations count full batches: samples / global_batch_size.
    With training.step_batch_size_schedule: samples / the last size."""
    lr_warmup_iters: NonNegativeInt | NonNegativeFloat = 0
    """Iterations over which the learning rate rises from lr_warmup_init to lr, in a line."""
    lr_warmup_fraction: float | None = Field(None, ge=0.0, le=1.0)
    """Warmup as a fraction of lr_decay_iters. Cannot be combined with lr_warmup_iters."""
    lr_warmup_init: NonNegativeFloat = 0.0
    """Learning rate of the first step of the warmup."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """With WSD: curve of the decay."""
    lr_wsd_decay_iters: PositiveInt | PositiveFloat | None = None
    """With WSD (warmup, stable, decay): iterations of the decay, the last ones before lr_decay_iters."""
    use_checkpoint_opt_param_scheduler: bool = False
    """Go on with the schedule of the checkpoint that a run continues: lr, min_lr, style and lengths of decay and
    warmup, and weight decay. Those of the config hold without such a checkpoint; lr_warmup_init and lr_wsd_* always."""
    weight_decay: NonNegativeFloat = 0.01
    """Applies to matrices and tables, not to biases and norms."""
    start_weight_decay: NonNegativeFloat | None = None
    """Weight decay of the first step, see weight_decay_incr_style."""
    end_weight_decay: NonNegativeFloat | None = None
    """Weight decay of the last step, see weight_decay_incr_style."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """linear and cosine: from start_weight_decay to end_weight_decay over train_iters, instead of weight_decay. With
    training.rampup_batch_size or step_batch_size_schedule: over the samples of the run."""
    adam_beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """Decay of Adam's mean of the gradient."""
    adam_beta2: float = Field(0.999, ge=0.0, lt=1.0)
    """Decay of Adam's mean of the squared gradient."""
    adam_eps: PositiveFloat = 1e-8
    """Epsilon of Adam, added to the root of the second moment."""
    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    """Storage of Adam's mean of the gradient. With bf16 it takes 2 instead of 4 bytes per parameter; each step still
    computes in float32, and rounds to nearest what it stores."""
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = "fp32"
    """The same for Adam's mean of the squared gradient. bf16 has 8 bits: with an adam_beta2 above 0.996 the change of a
    step may be rounded away, so that the mean no longer falls; use 0.95 to 0.99."""
    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which the gradients of the micro-batches, and then those of all ranks, are summed. bf16 takes 2 instead
    of 4 bytes per parameter and moves half the bytes, and each sum is rounded to 8 bits."""
    store_param_remainders: bool = False
    """With training.bf16 and adam: store only the 16 bits of each float32 master weight that its bf16 weight lacks, 2
    instead of 4 bytes per parameter. Masters stay exact. A weight midway between two bf16 numbers is rounded away from
    zero, not to even."""
    sgd_momentum: float = Field(0.9, ge=0.0, lt=1.0)
    """Momentum of SGD; 0 disables it."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest L2 norm of the whole model's gradient; 0 disables clipping."""
    optimizer_cpu_offload: bool = False
    """Keep master weights and moments in CPU memory and run the optimizer there. Each step moves gradients to the CPU
    and weights back."""
    optimizer_offload_fraction: float = Field(1.0, ge=0.0, le=1.0)
    """With optimizer_cpu_offload: share of the optimizer state that is in CPU memory."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Kinds of moments that the optimizer keeps: for each, one number of ``moment_bytes`` per parameter."""
        if self.optimizer == "adam":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self.sgd_momentum > 0.0 else ()

    def moment_bytes(self, kind: str) -> int:
        """Bytes of one number of a kind of moments: 2 for bf16, 4 for float32."""
        dtypes = {"exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}
        return 2 if dtypes.get(kind) == "bf16" else 4

    @property
    def master_bytes(self) -> int:
        """Bytes of a master beside its 16-bit weight."""
        return 2 if self.store_param_remainders else 4

    @field_validator("exp_avg_dtype", "exp_avg_sq_dtype", mode="before")
    @classmethod
    def _check_moment_dtype(cls, value: Any) -> Any:
        if value in ("fp16", "fp8"):
            raise ValueError(
                f"{value} is not supported: its range is too small for moments without scaling factors; use bf16, or "
                "fp32"
            )
        return value

    @property
    def decoupled(self) -> "OptimizerConfig | None":
        """The section with the learning rate of the word embeddings and the output layer; None without one."""
        if self.decoupled_lr is None:
            return None
        min_lr = self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
        return self.model_copy(update={"lr": self.decoupled_lr, "min_lr": min_lr})

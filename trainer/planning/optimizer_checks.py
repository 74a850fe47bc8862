"""Checks of the optimizer's states: what each dtype and place of them needs. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.planning.incompatible import Rows, refuse_first

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig

_OF_ADAM = "is about the state of Adam, but optimizer.optimizer is sgd; use adam, or leave this key out"

OF_STATES: Rows = (
    (
        "optimizer.optimizer_cpu_offload",
        lambda c: c.optimizer.optimizer_cpu_offload and c.parallel.zero_stage >= 2,
        "needs unsharded parameters on the device; use parallel.data_parallel_sharding_strategy optim, or leave it out",
    ),
    (
        "optimizer.main_grads_dtype",
        lambda c: c.optimizer.main_grads_dtype == "bf16" and not c.training.bf16,
        "bf16 needs training.bf16; set it, or leave this key out",
    ),
    (
        "optimizer.main_grads_dtype",
        lambda c: c.optimizer.main_grads_dtype == "bf16" and c.optimizer.optimizer != "adam",
        "bf16 needs optimizer.optimizer adam: sgd takes gradients in float32; use adam, or leave this key out",
    ),
    (
        "optimizer.main_grads_dtype",
        lambda c: c.optimizer.main_grads_dtype == "bf16" and c.optimizer.optimizer_cpu_offload,
        "bf16 is not supported with optimizer.optimizer_cpu_offload, which moves gradients in float32; leave one out",
    ),
    (
        "optimizer.main_grads_dtype",
        lambda c: c.optimizer.main_grads_dtype == "bf16" and c.parallel.zero_stage >= 2,
        "bf16 is not supported with ZeRO-2 and ZeRO-3, which sum shards in float32; use "
        "parallel.data_parallel_sharding_strategy optim, or leave this key out",
    ),
    (
        "optimizer.exp_avg_dtype",
        lambda c: c.optimizer.exp_avg_dtype != "fp32" and c.optimizer.optimizer != "adam",
        _OF_ADAM,
    ),
    (
        "optimizer.exp_avg_sq_dtype",
        lambda c: c.optimizer.exp_avg_sq_dtype != "fp32" and c.optimizer.optimizer != "adam",
        _OF_ADAM,
    ),
    (
        "optimizer.store_param_remainders",
        lambda c: c.optimizer.store_param_remainders and c.optimizer.optimizer != "adam",
        _OF_ADAM,
    ),
    (
        "optimizer.store_param_remainders",
        lambda c: c.optimizer.store_param_remainders and not c.training.bf16,
        "needs bf16 weights, which are the upper half of their masters; use training.bf16, or leave this key out",
    ),
    (
        "optimizer.store_param_remainders",
        lambda c: c.optimizer.store_param_remainders and c.parallel.zero_stage >= 2,
        "needs bf16 weights, but optim_grads and optim_grads_params shard float32 ones; use optim, or leave this out",
    ),
    (
        "optimizer.store_param_remainders",
        lambda c: c.optimizer.store_param_remainders and c.optimizer.optimizer_cpu_offload,
        "cannot be combined with optimizer_cpu_offload, which keeps masters in CPU memory; leave out one of the two",
    ),
    (
        "optimizer.optimizer_offload_fraction",
        lambda c: c.optimizer.optimizer_offload_fraction != 1.0 and not c.optimizer.optimizer_cpu_offload,
        "is only used with optimizer_cpu_offload, which is off; switch that on, or leave this key out",
    ),
)


def check_states(config: TrainConfig) -> None:
    """Refuse states that the rest of the config does not allow.

    Raises:
        ConfigError: names the key, and the remedy.
    """
    refuse_first(OF_STATES, config)

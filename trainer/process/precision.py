"""Warnings of 16-bit dtypes: slow products on the CPU, and moments that change too little for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from trainer.config.sections.optimizer import OptimizerConfig
    from trainer.config.sections.training import TrainingConfig
    from trainer.config.train_config import TrainConfig

_KEYS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def precision_warnings(config: TrainConfig, device: torch.device) -> list[str]:
    """Warnings for the log of a run whose ranks are on ``device``."""
    found = (slow_precision(config.training, device, cpu_has_fast_products), held_moments(config.optimizer))
    return [warning for warning in found if warning is not None]


def slow_precision(
    config: TrainingConfig, device: torch.device, has_fast_products: Callable[[torch.dtype], bool]
) -> str | None:
    """Warning if the run computes in 16 bits on a CPU that is faster in float32, or None.

    Args:
        config: the section training.
        device: device of the ranks.
        has_fast_products: True for a dtype whose matrices the CPU multiplies fast.
    """
    key = next((key for key in _KEYS if getattr(config, key)), None)
    if key is None or device.type != "cpu" or has_fast_products(_KEYS[key]):
        return None
    other = " or set training.bf16 instead," if key == "fp16" and has_fast_products(torch.bfloat16) else ""
    return (
        f"training.{key}: matrix products in {key} are slow on this processor, which has no instructions for them; "
        f"float32 is several times as fast here: remove training.{key},{other} or train on a GPU"
    )


def held_moments(optimizer: OptimizerConfig) -> str | None:
    """Warning if steps may round the fall of Adam's mean of the squared gradient away, or None.

    Without a gradient a step multiplies the mean by beta2. Half the distance of neighbours in bf16 is between 2^-9 and
    2^-8 of a number: less than that is rounded away.
    """
    if optimizer.exp_avg_sq_dtype != "bf16" or 1.0 - optimizer.adam_beta2 >= 2.0**-8:
        return None
    return (
        f"optimizer.exp_avg_sq_dtype: with adam_beta2 {optimizer.adam_beta2:g} a step changes the mean of the squared "
        "gradient by less than bf16 can store, so that the mean no longer falls; use an adam_beta2 of at most 0.996, "
        "or fp32"
    )


def cpu_has_fast_products(dtype: torch.dtype) -> bool:
    """True if oneDNN multiplies matrices of this 16-bit dtype on this processor.

    Otherwise torch multiplies them by a plain loop. On one core of an EPYC of the fourth generation (torch 2.13.0),
    products of 256 x 256 matrices reach 90 GFLOP/s in float32 and 180 in bf16, but 3 to 32 in bf16 if
    ``ONEDNN_MAX_CPU_ISA`` is AVX2, and 3 to 15 in fp16 at every level. A training step of 2 layers of 256 channels
    then takes 11 and 15 times the time of float32. ATen's level (``ATEN_CPU_CAPABILITY``) does not matter. With
    AVX-512 but no bf16 instructions oneDNN converts the matrices itself, at 36 GFLOP/s; these count as fast.
    """
    products = torch.ops.mkldnn
    name = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    # A torch without oneDNN cannot be asked, so nothing is warned of.
    return not hasattr(products, name) or bool(getattr(products, name)())

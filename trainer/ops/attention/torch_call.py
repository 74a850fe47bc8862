"""Torch's own attention call, which chooses among its kernels."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from trainer.ops.attention.interface import repeat_groups
from trainer.ops.attention.kernels import GROUPS_ON_CPU, has_torch_flash
from trainer.ops.attention.settings import AttentionSettings


def torch_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: AttentionSettings, dropout: float = 0.0
) -> torch.Tensor:
    """Torch's own call: causal over as many keys as queries, or over all keys; masks from its default generator."""
    # Memory is linear in S if torch has a fused kernel: on CPUs, and on GPUs since Volta (V100).
    attend_fused = partial(
        F.scaled_dot_product_attention, dropout_p=dropout, is_causal=settings.causal, scale=settings.scale
    )
    if query.shape[1] == key.shape[1]:
        return attend_fused(query, key, value)
    if has_grouped_kernel(query):
        return attend_fused(query, key, value, enable_gqa=True)
    copies = query.shape[1] // key.shape[1]
    return attend_fused(query, repeat_groups(key, copies), repeat_groups(value, copies))


def has_grouped_kernel(query: torch.Tensor) -> bool:
    """True if torch's kernels take fewer keys than queries of this dtype and width on this device."""
    if query.is_cpu:
        return GROUPS_ON_CPU
    # The other kernels would fall back to S x S scores.
    return query.is_cuda and has_torch_flash(query.dtype, query.shape[-1], query.device)

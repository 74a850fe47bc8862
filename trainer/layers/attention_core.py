"""Attention itself: from queries, keys and values to what each query reads.

Legend: S sequence, B micro-batch, A heads, G query groups, R = A/G queries per group, D head width; ``/t`` = divided
over tp. Vaswani et al. 2017 (arXiv:1706.03762), equation 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from trainer.axes import ParallelAxes
from trainer.forward_pass import ForwardPass
from trainer.layers.dropout import apply_mask, draw_mask
from trainer.random_streams import MicroBatchRandomness


@dataclass(frozen=True)
class AttentionCore:
    """What attention of one layer is computed with.

    Attributes:
        layer: its number in the whole model.
        dropout: share of the attention weights that is dropped where there is randomness.
        axes: the axes along which the layer is divided.
    """

    layer: int
    dropout: float
    axes: ParallelAxes


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, forward_pass: ForwardPass, core: AttentionCore
) -> torch.Tensor:
    """[B, A/t, S, D]: query [B, A/t, S, D] attends to key and value [B, G/t, S, D] up to its own position.

    Rank r of tp holds the query heads from r x A/t on. Collective: all cp ranks.
    """
    randomness = forward_pass.randomness
    if randomness is not None and core.dropout > 0.0:
        return _attend_with_dropout(query, key, value, randomness, core)
    return _causal_attention(query, key, value)


def _attend_with_dropout(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, randomness: MicroBatchRandomness, core: AttentionCore
) -> torch.Tensor:
    # Unfused, because no fused kernel takes its mask from a stream of ours, and a mask must not depend on the layout:
    # each head of the whole model has a stream of its own.
    batch, heads, length, head_dim = query.shape
    groups = key.shape[1]
    first = core.axes.tp.rank * heads
    streams = [
        randomness.dropout_generator(query.device, "attention", core.layer, part=head)
        for head in range(first, first + heads)
    ]
    kept = torch.stack([draw_mask((batch, length, length), core.dropout, stream) for stream in streams], dim=1)
    kept = kept.view(batch, groups, -1, length, length)  # [B, G/t, R, S, S]
    grouped = (query * head_dim**-0.5).unflatten(1, (groups, -1))  # [B, G/t, R, S, D]
    scores = grouped @ key.unsqueeze(2).transpose(-1, -2)
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    shares = torch.softmax(
        scores.masked_fill(future, -torch.inf), dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)
    )
    shares = apply_mask(shares, kept, core.dropout).to(value.dtype)
    return (shares @ value.unsqueeze(2)).flatten(1, 2)


def _causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    # Memory is linear in S wherever torch has a fused kernel: on CPUs, on GPUs since Volta (V100).
    if query.shape[1] == key.shape[1]:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    if _has_grouped_kernel(query):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _has_grouped_kernel(query: torch.Tensor) -> bool:
    # Only the flash kernel (16 bit, Ampere or later) groups without help; the others would fall back to S x S scores.
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0)

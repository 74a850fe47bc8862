"""Causal self-attention with its heads divided over tp.

Legend: S sequence, B micro-batch, H hidden, A heads, G query groups, R = A/G queries per group, D head width;
``/t`` = divided over tp.
Vaswani et al. 2017 (arXiv:1706.03762), equation 1; Ainslie et al. 2023 (arXiv:2305.13245) for grouped queries.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from trainer.axes import ParallelAxes
from trainer.config import ModelConfig
from trainer.forward_pass import ForwardPass
from trainer.layers.dropout import apply_mask, draw_mask
from trainer.layers.rotary import split_heads
from trainer.parameters import PackedHeads, ParameterBuilder
from trainer.random_streams import MicroBatchRandomness
from trainer.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear


class SelfAttention(nn.Module):
    """[S(/t), B, H] -> [S(/t), B, H]. A tp rank computes A/t whole heads, in G/t query groups."""

    def __init__(self, model: ModelConfig, layer: int, builder: ParameterBuilder, axes: ParallelAxes):
        super().__init__()
        self._layer = layer
        tp = self._tp = axes.tp
        self._head_dim = model.head_dim
        self._queries_per_group = model.num_attention_heads // model.query_groups
        self._dropout = model.attention_dropout
        hidden, heads_width = model.hidden_size, model.num_attention_heads * model.head_dim
        packed_width = model.query_groups * (self._queries_per_group + 2) * model.head_dim
        qkv, projection = builder.under("qkv"), builder.under("projection")
        packed = PackedHeads(model.query_groups, self._queries_per_group, model.head_dim)
        has_qkv_bias = model.add_qkv_bias or not model.disable_bias_linear
        self.qkv = ColumnParallelLinear(
            qkv.weight("weight", (packed_width, hidden), std=model.init_method_std, tp_dim=0, packed_heads=packed),
            qkv.vector("bias", (packed_width,), value=0.0, tp_dim=0, on_sequence_shard=False, packed_heads=packed)
            if has_qkv_bias
            else None,
            tp,
        )
        self.projection = RowParallelLinear(
            projection.weight(
                "weight",
                (hidden, heads_width),
                std=model.init_method_std / math.sqrt(2 * model.num_layers),
                tp_dim=1,
            ),
            None
            if model.disable_bias_linear
            else projection.vector("bias", (hidden,), value=0.0, on_sequence_shard=True),
            tp,
        )

    def forward(self, hidden: torch.Tensor, forward_pass: ForwardPass) -> torch.Tensor:
        """Collective: all tp ranks."""
        rotary, randomness = forward_pass.rotary, forward_pass.randomness
        query, key, value = split_heads(self.qkv(hidden), self._queries_per_group, self._head_dim, rotary)
        if randomness is not None and self._dropout > 0.0:
            context = self._attend_with_dropout(query, key, value, randomness)
        else:
            context = causal_attention(query, key, value)
        return self.projection(context.permute(2, 0, 1, 3).flatten(2))  # type: ignore[no-any-return]

    def _attend_with_dropout(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, randomness: MicroBatchRandomness
    ) -> torch.Tensor:
        # Unfused, because no fused kernel takes its mask from a stream of ours, and a mask must not depend on tp.
        batch, groups, length, _ = key.shape
        kept = torch.stack(
            [
                draw_mask(
                    (batch, self._queries_per_group, length, length),
                    self._dropout,
                    randomness.dropout_generator(
                        query.device, "attention", self._layer, part=self._tp.rank * groups + group
                    ),
                )
                for group in range(groups)
            ],
            dim=1,
        )  # [B, G/t, R, S, S]
        grouped = (query * self._head_dim**-0.5).unflatten(1, (groups, -1))  # [B, G/t, R, S, D]
        scores = grouped @ key.unsqueeze(2).transpose(-1, -2)
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        shares = torch.softmax(
            scores.masked_fill(future, -torch.inf), dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)
        )
        shares = apply_mask(shares, kept, self._dropout).to(value.dtype)
        return (shares @ value.unsqueeze(2)).flatten(1, 2)


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Query [B, A, S, D] attends to key and value [B, G, S, D] up to its own position; [B, A, S, D] comes out.

    Memory is linear in S wherever torch has a fused kernel: on CPUs, on GPUs since Volta (V100).
    """
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

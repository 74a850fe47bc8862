"""Self-attention with its heads divided over tp.

Legend: S sequence, B micro-batch, H hidden, A heads, G query groups, R = A/G queries per group, D head width;
``/t`` = divided over tp.
Vaswani et al. 2017 (arXiv:1706.03762), equation 1; Ainslie et al. 2023 (arXiv:2305.13245) for grouped queries.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from trainer.config.sections.model import ModelConfig
from trainer.config.sections.scales import matrix_std
from trainer.distributed.mesh import copies_of_groups
from trainer.model.attention.core_attention import AttentionCore, attend
from trainer.model.attention.output_projection import build_projection
from trainer.model.attention.query_key_norm import QueryKeyNorm
from trainer.model.context import ForwardPass, ParallelAxes
from trainer.model.recompute import recompute
from trainer.model.sharding import PackedHeads, ParameterBuilder
from trainer.model.tensor_parallel.linear import ColumnParallelLinear
from trainer.ops.attention.backend import choose_backend
from trainer.ops.attention.settings import AttentionSettings
from trainer.ops.rotary import ROPE


class SelfAttention(nn.Module):
    """[S(/t), B, H] -> [S(/t), B, H].

    A tp rank computes A/t whole heads: G/t query groups, or a part of one group.
    """

    def __init__(
        self,
        model: ModelConfig,
        layer: int,
        builder: ParameterBuilder,
        axes: ParallelAxes,
        recompute_core: bool = False,
    ):
        """Build the layer's attention; with ``recompute_core`` backward recomputes scores that forward would keep.

        Raises:
            ValueError: tp and the number of query groups do not divide each other.
        """
        super().__init__()
        self._recompute_core = recompute_core
        self._core = AttentionCore(
            layer,
            model.attention_dropout,
            axes,
            AttentionSettings.of(model, layer),
            choose_backend(model, builder.dtype, builder.device, builder.kernels.flash_attn),
            builder.kernels,
        )
        tp = axes.tp
        self._head_dim = model.head_dim
        self._is_interleaved = model.rotary_interleaved
        self._has_window = model.window_of(layer) is not None
        self._has_rope = model.has_rope(layer)
        queries_per_group = model.num_attention_heads // model.query_groups
        _check_groups(model, tp.size)
        copies = copies_of_groups(model.query_groups, tp.size)
        # Each of the ranks that share a group has a part of its queries, and a copy of its key and value.
        self._queries_per_group = queries_per_group // copies
        hidden, heads_width = model.hidden_size, model.num_attention_heads * model.head_dim
        packed_width = model.query_groups * (queries_per_group + 2) * model.head_dim
        qkv = builder.under("qkv")
        packed = PackedHeads(model.query_groups, queries_per_group, model.head_dim)
        self.qkv = ColumnParallelLinear(
            qkv.weight("weight", (packed_width, hidden), std=matrix_std(model), tp_dim=0, packed_heads=packed),
            qkv.vector("bias", (packed_width,), value=0.0, tp_dim=0, on_sequence_shard=False, packed_heads=packed)
            if model.has_qkv_bias
            else None,
            tp,
        )
        self.qk_norm = QueryKeyNorm(model, builder, tp) if model.qk_layernorm else None
        self.projection = build_projection(model, heads_width, builder.under("projection"), tp)
        self.sinks = (
            builder.vector("sinks", (model.num_attention_heads,), value=0.0, tp_dim=0, on_sequence_shard=False)
            if model.attention_sinks
            else None
        )

    @property
    def output_bias(self) -> nn.Parameter | None:
        """[H], the bias added to the output."""
        return self.projection.bias

    def forward(self, hidden: torch.Tensor, forward_pass: ForwardPass, *, adds_bias: bool = True) -> torch.Tensor:
        """Collective: all tp and cp ranks. Without ``adds_bias`` the next op adds ``output_bias``."""
        rotary = forward_pass.rotary_of(has_window=self._has_window) if self._has_rope else None
        cos, sin = (None, None) if rotary is None else (rotary.cos, rotary.sin)
        packed = self.qkv(hidden)
        if self.qk_norm is not None:
            heads = packed.unflatten(-1, (-1, self._queries_per_group + 2, self._head_dim))
            packed = self.qk_norm(heads).flatten(2)
        # The op overwrites the packed heads: it rotates them in place.
        split_heads = self._core.kernels[ROPE]
        query, key, value = split_heads(packed, self._queries_per_group, self._head_dim, cos, sin, self._is_interleaved)
        if rotary is not None and rotary.query_scale is not None:
            query = query * rotary.query_scale.flatten(1).t()[:, None, :, None]
        if forward_pass.linear_bias is not None:
            query, key = forward_pass.linear_bias.behind(query, key)
        core = partial(self._attend, forward_pass)
        # Other kernels keep no scores, only tensors that are kept anyway: a replay would save nothing.
        replays = self._recompute_core and self._core.keeps_scores(forward_pass)
        context = recompute(core, query, key, value) if replays else core(query, key, value)
        return self.projection(context.permute(2, 0, 1, 3).flatten(2), adds_bias=adds_bias)  # type: ignore[no-any-return]

    def _attend(
        self,
        forward_pass: ForwardPass,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        needs_values: bool = True,
    ) -> torch.Tensor:
        del needs_values  # attention's own backward reads the values, so that nothing can be left out
        return attend(query, key, value, forward_pass, self._core, sinks=self.sinks, key_mask=forward_pass.key_mask)


def _check_groups(model: ModelConfig, tp: int) -> None:
    heads, groups = model.num_attention_heads, model.query_groups
    if heads % tp or (tp % groups and groups % tp):
        raise ValueError(f"{heads} heads in {groups} query groups cannot be divided over {tp} tensor-parallel ranks")

"""Attention of an encoder or decoder layer to its own stack or to the encoder's output; heads divided over tp.

Legend: Q queries and K keys, B micro-batch, H hidden, A heads, D head width; ``/t`` = divided over tp.
Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.3, with the position bias of Raffel et al. 2020
(arXiv:1910.10683), section 2.1.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import nn

from trainer.config.sections.model import ModelConfig
from trainer.model.attention.core_attention import AttentionCore, attend
from trainer.model.attention.output_projection import build_projection
from trainer.model.context import ForwardPass
from trainer.model.recompute import recompute
from trainer.model.sharding import ParameterBuilder
from trainer.model.tensor_parallel.collectives import enter_parallel_region
from trainer.model.tensor_parallel.linear import ColumnParallelLinear
from trainer.ops.rotary import rotate


class Attention(nn.Module):
    """[Q(/t), B, H] -> [Q(/t), B, H]. A tp rank computes A/t whole heads."""

    def __init__(self, model: ModelConfig, builder: ParameterBuilder, core: AttentionCore, *, recompute_core: bool):
        """Build the attention; with ``recompute_core`` backward recomputes scores that forward would keep."""
        super().__init__()
        self._core = core
        self._recompute_core = recompute_core
        self._head_dim = model.head_dim
        self._is_interleaved = model.rotary_interleaved
        hidden, width = model.hidden_size, model.num_attention_heads * model.head_dim
        # Initial scores are as large as with the usual scale, 1 / sqrt(D): T5 has that factor in its initial queries.
        query_std = model.init_method_std / (core.settings.scale * math.sqrt(model.head_dim))
        self._tp = core.axes.tp
        self.query = self._product(builder.under("query"), (width,), hidden, query_std, has_bias=model.has_qkv_bias)
        self.key_value = self._product(
            builder.under("key_value"), (2, width), hidden, model.init_method_std, has_bias=model.has_qkv_bias
        )
        self.projection = build_projection(model, width, builder.under("projection"), self._tp)

    def _product(
        self, builder: ParameterBuilder, outer: tuple[int, ...], hidden: int, std: float, *, has_bias: bool
    ) -> ColumnParallelLinear:
        dim = len(outer) - 1
        bias = builder.vector("bias", outer, value=0.0, tp_dim=dim, on_sequence_shard=False) if has_bias else None
        return ColumnParallelLinear(builder.weight("weight", (*outer, hidden), std=std, tp_dim=dim), bias, self._tp)

    def forward(
        self,
        hidden: torch.Tensor,
        forward_pass: ForwardPass,
        *,
        source: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        key_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Collective: all tp ranks.

        Args:
            hidden: [Q(/t), B, H].
            forward_pass: randomness, and the rotation of queries and keys of the own stack.
            source: [K, B, H], the output of enter_parallel_region that keys and values come from; None: ``hidden``.
            bias: see trainer.model.attention.core_attention.attend.
            key_mask: see there.
        """
        # Distances between the tokens of two stacks have no meaning.
        rotary = forward_pass.rotary if source is None else None
        if source is None:
            # One collective for both products.
            hidden = source = enter_parallel_region(hidden, self._tp)
            query = self.query(hidden, True)
        else:
            query = self.query(hidden)
        query = query.unflatten(-1, (-1, self._head_dim))  # [Q, B, A/t, D]
        key, value = self.key_value(source, True).unflatten(-1, (2, -1, self._head_dim)).unbind(2)  # [K, B, A/t, D]
        if rotary is not None:
            query, key = (rotate(each, rotary.cos, rotary.sin, self._is_interleaved) for each in (query, key))
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))  # [B, A/t, Q or K, D]
        core = partial(self._attend, forward_pass, key_mask)
        seen = (query, key, value) if bias is None else (query, key, value, bias)
        context = recompute(core, *seen) if self._recompute_core else core(*seen)
        return self.projection(context.permute(2, 0, 1, 3).flatten(2))  # type: ignore[no-any-return]

    def _attend(
        self,
        forward_pass: ForwardPass,
        key_mask: torch.Tensor | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        needs_values: bool = True,
    ) -> torch.Tensor:
        del needs_values  # attention's own backward reads the values, so that nothing can be left out
        return attend(query, key, value, forward_pass, self._core, bias=bias, key_mask=key_mask)

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


class Attention(nn.Module):
    """[Q(/t), B, H] -> [Q(/t), B, H]. A tp rank computes A/t whole heads."""

    def __init__(self, model: ModelConfig, builder: ParameterBuilder, core: AttentionCore, *, recompute_core: bool):
        """Build the attention; with ``recompute_core`` backward recomputes scores that forward would keep."""
        super().__init__()
        self._core = core
        self._recompute_core = recompute_core
        self._head_dim = model.head_dim
        hidden, width = model.hidden_size, model.num_attention_heads * model.head_dim
        # Initial scores are as large as with the usual scale, 1 / sqrt(D): T5 has that factor in its initial queries.
        query_std = model.init_method_std / (core.settings.scale * math.sqrt(model.head_dim))
        self._tp = core.axes.tp
        self.query = ColumnParallelLinear(
            builder.under("query").weight("weight", (width, hidden), std=query_std, tp_dim=0), None, self._tp
        )
        self.key_value = ColumnParallelLinear(
            builder.under("key_value").weight("weight", (2, width, hidden), std=model.init_method_std, tp_dim=1),
            None,
            self._tp,
        )
        self.projection = build_projection(model, width, builder.under("projection"), self._tp)

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
            forward_pass: randomness.
            source: [K, B, H], the output of enter_parallel_region that keys and values come from; None: ``hidden``.
            bias: see trainer.model.attention.core_attention.attend.
            key_mask: see there.
        """
        if source is None:
            # One collective for both products.
            hidden = source = enter_parallel_region(hidden, self._tp)
            query = self.query(hidden, True)
        else:
            query = self.query(hidden)
        query = query.unflatten(-1, (-1, self._head_dim)).permute(1, 2, 0, 3)  # [B, A/t, Q, D]
        key_value = self.key_value(source, True).unflatten(-1, (2, -1, self._head_dim))
        key, value = key_value.permute(2, 1, 3, 0, 4)  # [B, A/t, K, D] each
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

"""Relative position bias: a number per head and bucket of distances, added to the attention scores.

Legend: Q queries, K keys, A heads, N buckets; ``/t`` = divided over tp.
Raffel et al. 2020, T5 (arXiv:1910.10683), section 2.1; the logarithmic buckets are those of the released models.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from trainer.config.sections.model import ModelConfig
from trainer.model.sharding import ParameterBuilder


class RelativeBias(nn.Module):
    """The table [N, A/t] of one stack, and the bias that all its layers add to their scores."""

    def __init__(self, model: ModelConfig, builder: ParameterBuilder, *, causal: bool):
        """Build the table.

        Args:
            model: shape of the model.
            builder: makes the table. Each tp rank holds the columns of its heads, so that no gradient is summed.
            causal: no query sees a later key, so that all buckets are for earlier ones.
        """
        super().__init__()
        self._causal = causal
        self._max_distance = model.relative_attention_max_distance
        self.weight = builder.weight(
            "weight",
            (model.relative_attention_num_buckets, model.num_attention_heads),
            std=model.init_method_std,
            tp_dim=1,
        )

    def forward(self, queries: int, keys: int) -> torch.Tensor:
        """[A/t, Q, K] in the dtype of the weights. No communication."""
        positions = torch.arange(max(queries, keys), device=self.weight.device)
        distances = positions[None, :keys] - positions[:queries, None]  # [Q, K]
        buckets = distance_buckets(distances, len(self.weight), self._max_distance, causal=self._causal)
        # In float32, so that backward sums the Q x K gradients of the few rows in float32.
        found = F.embedding(buckets, self.weight.float())  # [Q, K, A/t]
        return found.to(self.weight.dtype).permute(2, 0, 1)  # [A/t, Q, K]


def distance_buckets(distances: torch.Tensor, count: int, max_distance: int, *, causal: bool) -> torch.Tensor:
    """Bucket, from 0 to ``count`` - 1, of each distance.

    Half of the buckets of a direction hold one distance each. The others widen in proportion to the distance; the last
    also holds all distances from ``max_distance`` on.

    Args:
        distances: position of the key minus that of the query, int64.
        count: number of buckets; without ``causal`` half of them are for later keys.
        max_distance: above half the buckets of a direction.
        causal: later keys, which no query sees, count as distance 0.
    """
    if causal:
        first, distances = torch.zeros_like(distances), (-distances).clamp(min=0)
    else:
        count //= 2
        first, distances = (distances > 0) * count, distances.abs()
    exact = count // 2
    # In float32, as the released models were trained: more precise logarithms could round to another bucket.
    share = torch.log(distances.clamp(min=exact).float() / exact) / math.log(max_distance / exact)
    wide = (exact + (share * (count - exact)).long()).clamp(max=count - 1)
    return first + torch.where(distances < exact, distances, wide)

"""Norm of queries and keys before rope: over each head, or over all heads together.

Legend: S sequence, B micro-batch, A heads, G query groups, R = A/G queries per group, D head width; ``/t`` = divided
over tp. Dehghani et al. 2023 (arXiv:2302.05442), section 2, normalize each head; OLMo 2 (arXiv:2501.00656), section
3.3, normalizes all heads together.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from trainer.config.sections.model import ModelConfig
from trainer.distributed.mesh import copies_of_groups
from trainer.model.sharding import PackedHeads, ParameterBuilder
from trainer.model.tensor_parallel.collectives import TensorParallel
from trainer.ops.layer_norm import LAYER_NORM
from trainer.ops.rms_norm import RMS_NORM


class QueryKeyNorm(nn.Module):
    """[S, B, G/t, R+2, D] -> the same, with normalized queries and keys, in new memory."""

    def __init__(self, model: ModelConfig, builder: ParameterBuilder, tp: TensorParallel):
        """Build the norms ``q_norm`` and ``k_norm`` below ``builder``."""
        super().__init__()
        self._over_all = _AllHeads(model, builder, tp) if model.qk_layernorm_scope == "all" else None
        if self._over_all is None:
            self.q_norm = _EachHead(model, builder.under("q_norm"))
            self.k_norm = _EachHead(model, builder.under("k_norm"))

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """Values pass unchanged. Collective, also in backward, with scope all: all tp ranks."""
        query, key, value = heads[..., :-2, :], heads[..., -2:-1, :], heads[..., -1:, :]
        if self._over_all is None:
            query, key = self.q_norm(query), self.k_norm(key)
        else:
            normed_query, normed_key = self._over_all(query.flatten(2), key.flatten(2))
            query, key = normed_query.view(query.shape), normed_key.view(key.shape)
        return torch.cat((query, key, value), dim=3)


class _EachHead(nn.Module):
    """[..., D] -> [..., D], with one weight for all heads.

    Every tp rank has the whole weight, but sees only the gradient of its own heads.
    """

    def __init__(self, model: ModelConfig, builder: ParameterBuilder):
        super().__init__()
        shape = (model.head_dim,)
        self.weight = builder.vector(
            "weight", shape, value=_first_weight(model), on_sequence_shard=False, partial_over_tp=True
        )
        self.bias: nn.Parameter | None = None
        if model.normalization == "LayerNorm":
            self.bias = builder.vector("bias", shape, value=0.0, on_sequence_shard=False, partial_over_tp=True)
        self._adds_one = model.apply_layernorm_1p
        self._epsilon = model.norm_epsilon
        self._kernels = builder.kernels

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            return self._kernels[LAYER_NORM](heads, self.weight, self.bias, self._epsilon, self._adds_one)
        return self._kernels[RMS_NORM](heads, self.weight, self._epsilon, self._adds_one)


class _AllHeads(nn.Module):
    """RMSNorm of queries [S, B, A*D/t] over A*D channels, and of keys [S, B, G*D/t] over G*D channels."""

    def __init__(self, model: ModelConfig, builder: ParameterBuilder, tp: TensorParallel):
        super().__init__()
        groups, width = model.query_groups, model.head_dim
        self._widths = (model.num_attention_heads * width, groups * width)
        first = _first_weight(model)
        self.query_weight = builder.under("q_norm").vector(
            "weight", self._widths[:1], value=first, tp_dim=0, on_sequence_shard=False
        )
        self.key_weight = builder.under("k_norm").vector(
            "weight",
            self._widths[1:],
            value=first,
            tp_dim=0,
            on_sequence_shard=False,
            packed_heads=PackedHeads(groups, 0, width, shared=1),
        )
        self._adds_one = model.apply_layernorm_1p
        self._epsilon = model.norm_epsilon
        self._kernels = builder.kernels
        self._tp = tp
        self._copies = (1, copies_of_groups(groups, tp.size))

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = (self.query_weight, self.key_weight)
        if self._tp.size == 1:
            norm, rest_of_norm = self._kernels[RMS_NORM], (self._epsilon, self._adds_one)
            return norm(query, weights[0], *rest_of_norm), norm(key, weights[1], *rest_of_norm)
        query_weight, key_weight = (weight + 1 for weight in weights) if self._adds_one else weights
        rest = (self._widths, self._copies, self._epsilon, self._tp)
        normed: tuple[torch.Tensor, torch.Tensor] = _RMSNormOverRanks.apply(query, key, query_weight, key_weight, *rest)  # type: ignore[no-untyped-call]
        return normed


def _first_weight(model: ModelConfig) -> float:
    return 0.0 if model.apply_layernorm_1p else 1.0


class _RMSNormOverRanks(torch.autograd.Function):
    """RMSNorm of two tensors whose channels are divided over tp; one all-reduce for both, in each direction.

    ``copies`` consecutive ranks hold the same channels. Each of them counts a share of the sum of squares; in backward
    each has the gradient of its own queries, so that the sum over the ranks is the whole gradient.
    Zhang and Sennrich 2019 (arXiv:1910.07467), equation 4.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
        widths: tuple[int, int],
        copies: tuple[int, int],
        epsilon: float,
        tp: TensorParallel,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        precise = torch.promote_types(query.dtype, torch.float32)
        squares = [
            torch.linalg.vector_norm(part, dim=-1, dtype=precise).square_() / count
            for part, count in zip((query, key), copies, strict=True)
        ]
        sums = _sum_over_ranks(squares, tp)
        scales = [(total / width + epsilon).rsqrt_() for total, width in zip(sums, widths, strict=True)]
        ctx.save_for_backward(query, key, query_weight, key_weight, *scales)
        ctx.widths, ctx.copies, ctx.tp = widths, copies, tp
        normed_query, normed_key = (
            (part * scale.unsqueeze(-1)).mul_(weight).to(part.dtype)
            for part, scale, weight in zip((query, key), scales, (query_weight, key_weight), strict=True)
        )
        return normed_query, normed_key

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, None, None, None, None]:
        parts, weights, scales = (ctx.saved_tensors[start : start + 2] for start in (0, 2, 4))
        units = [part * scale.unsqueeze(-1) for part, scale in zip(parts, scales, strict=True)]
        products = [grad * unit for grad, unit in zip(grads, units, strict=True)]
        # The norm does not depend on the length of its input: remove the gradient's component along the unit vector.
        along = _sum_over_ranks(
            [own @ weight.to(own.dtype) for own, weight in zip(products, weights, strict=True)], ctx.tp
        )
        found = []
        for grad, unit, weight, scale, total, width, count in zip(
            grads, units, weights, scales, along, ctx.widths, ctx.copies, strict=True
        ):
            share = (total / (width * count)).unsqueeze(-1)
            found.append((grad.to(unit.dtype) * weight).addcmul_(unit, share, value=-1).mul_(scale.unsqueeze(-1)))
        query, key = (whole.to(part.dtype) for whole, part in zip(found, parts, strict=True))
        query_weight, key_weight = (
            own.flatten(0, -2).sum(0).to(weight.dtype) for own, weight in zip(products, weights, strict=True)
        )
        return query, key, query_weight, key_weight, None, None, None, None


def _sum_over_ranks(parts: list[torch.Tensor], tp: TensorParallel) -> tuple[torch.Tensor, ...]:
    both = torch.stack(parts)
    dist.all_reduce(both, group=tp.group)
    return both.unbind()

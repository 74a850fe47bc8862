"""Attention with an additive bias or a mask of keys: the scores of T5, the padding of BERT.

With dropout plain torch goes over blocks of rows, and keeps neither scores nor masks.

Legend: B micro-batch, A heads, G query groups, Q queries, K keys, D width of a query or key head, V of a value head.
Bias: Raffel et al. 2020, T5 (arXiv:1910.10683), section 2.1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from trainer.ops.attention.interface import precise, repeat_groups
from trainer.ops.attention.kept_weights import KeptWeights
from trainer.ops.attention.settings import AttentionSettings
from trainer.ops.attention.tiles import Band
from trainer.ops.attention.unfused import Unfused, outside


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    settings: AttentionSettings,
    *,
    bias: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    weights: KeptWeights | None = None,
) -> torch.Tensor:
    """Attention [B, A, Q, V], fused where torch can, by blocks of rows with dropout, else with all scores in memory.

    Args:
        query: [B, A, Q, D].
        key: [B, G, K, D].
        value: [B, G, K, V].
        settings: scores, and the keys that a query sees.
        bias: [A, Q, K] or [B, A, Q, K], added to the scaled and capped scores; None: no bias.
        key_mask: [B, K], True for keys that take part, with such a key for every query; None: all keys.
        sinks: logits [A] that take part in each head's softmax without a value; None: no sinks.
        weights: dropout; None: no dropout.
    """
    if weights is not None and sinks is None:
        band = Band.of(key.shape[2] - query.shape[2], settings.causal, settings.window)
        every = _additive_mask(query, key, replace(settings, causal=False), bias, key_mask)
        output: torch.Tensor = _DroppedAttention.apply(query, key, value, every, settings, band, weights)  # type: ignore[no-untyped-call]
        return output
    copies = query.shape[1] // key.shape[1]
    key, value = repeat_groups(key, copies), repeat_groups(value, copies)
    mask = _additive_mask(query, key, settings, bias, key_mask)
    if settings.softcap is None and sinks is None and weights is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=settings.scale)
    scores = (query * settings.scale) @ key.mT
    scores = scores.to(precise(scores.dtype))
    if settings.softcap is not None:
        scores = settings.softcap * torch.tanh(scores / settings.softcap)
    scores = scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    shares = scores.softmax(-1)[..., : key.shape[2]]
    if weights is not None:
        shares = shares.masked_fill(weights.dropped(), 0.0) / (1.0 - weights.probability)
    return shares.to(value.dtype) @ value


class _DroppedAttention(torch.autograd.Function):
    """Attention with dropout and a bias [B, A, Q, K], which may be expanded and hold -inf."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor,
        settings: AttentionSettings,
        band: Band,
        weights: KeptWeights,
    ) -> torch.Tensor:
        ctx.form = {"settings": settings, "band": band, "weights": weights}
        output, log_sum_exp = Unfused().forward(query, key, value, bias=bias, **ctx.form)
        ctx.save_for_backward(query, key, value, output, log_sum_exp, bias)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *tensors, bias = ctx.saved_tensors
        grad_bias = torch.zeros_like(bias, memory_format=torch.contiguous_format) if ctx.needs_input_grad[3] else None
        grads = Unfused().backward(grad_output, *tensors, bias=bias, grad_bias=grad_bias, **ctx.form)
        return *grads, grad_bias, None, None, None


def _additive_mask(
    query: torch.Tensor,
    key: torch.Tensor,
    settings: AttentionSettings,
    bias: torch.Tensor | None,
    key_mask: torch.Tensor | None,
) -> torch.Tensor:
    """[B, A, Q, K] to add to the scores: the bias, and -inf for keys out of sight; dims without difference expanded."""
    shape = (*query.shape[:3], key.shape[2])
    mask = query.new_zeros(()) if bias is None else bias.to(query.dtype)
    band = Band.of(shape[3] - shape[2], settings.causal, settings.window)
    if settings.causal:
        mask = mask.masked_fill(outside(band, shape[2], shape[3], query.device), -torch.inf)
    if key_mask is not None:
        mask = mask.masked_fill(~key_mask[:, None, None], -torch.inf)
    return mask.expand(shape)

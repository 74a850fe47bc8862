"""Attention of one query per row over the keys of a cache.

Legend: B rows, A heads, G query groups, R = A/G queries per group, K keys, D width of a query or key head, V of a value
head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from trainer.ops.attention.interface import precise
from trainer.ops.attention.settings import AttentionSettings


def single_query_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    settings: AttentionSettings,
    seen: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Context [B, A, 1, V] of one query per row, which sees all keys or those of ``seen``. Has no gradient of its own.

    Args:
        query: [B, A, 1, D].
        key: [B, G, K, D].
        value: [B, G, K, V].
        settings: scale and softcap; the caller cuts the keys to the window.
        seen: [B, K], True for keys that take part, at least one per row; None: all keys.
        sinks: logits [A] that take part in each head's softmax without a value; None: no sinks.
    """
    batch, heads, _, width = query.shape
    # The queries of a group are rows of one matrix product, so that its keys need no copies.
    grouped = query.reshape(batch, key.shape[1], -1, width)  # [B, G, R, D]
    mask = None
    if seen is not None:
        mask = query.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)[:, None, None]  # [B, 1, 1, K]
    if settings.softcap is None and sinks is None:
        context = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=settings.scale)
        return context.reshape(batch, heads, 1, -1)
    scores = (grouped * settings.scale) @ key.mT  # [B, G, R, K]
    scores = scores.to(precise(scores.dtype))
    if settings.softcap is not None:
        scores = settings.softcap * torch.tanh(scores / settings.softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, key.shape[1], -1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    shares = scores.softmax(-1)[..., : key.shape[2]]
    return (shares.to(value.dtype) @ value).reshape(batch, heads, 1, -1)

"""Attention in plain torch, one block of rows of the score matrix at a time.

Legend: B samples, A heads, G query groups, R = A/G, Q queries, K keys, D width of a query or key head, V of a
value head. Dao et al. 2022 (arXiv:2205.14135), appendix B, for the backward from output and log-sum-exp. Softcap: Gemma
2 (arXiv:2408.00118), section 2. Dropout leaves the log-sum-exp as it is: it drops weights after the softmax.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer.ops.attention.interface import Gradients, precise
from trainer.ops.attention.kept_weights import KeptWeights
from trainer.ops.attention.settings import AttentionSettings
from trainer.ops.attention.tiles import FULL, Band, Tile, row_blocks

ForwardBlock = Callable[[Tile, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Output and log-sum-exp of a block, from its slices of query, key and value."""
BackwardBlock = Callable[..., Gradients]
"""Gradients of a block's slices, from the block and its slices of the arguments of a kernel's backward."""


class Unfused:
    """Attention for devices, dtypes and settings without a fused kernel."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        settings: AttentionSettings,
        band: Band,
        weights: KeptWeights | None = None,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionKernel; ``weights``: dropout of the weights; ``bias``: [B, A, Q, K], added to the scores."""

        def compute(
            block: Tile, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            scores = _hide_(_add_(_capped_scores(query, key, settings), bias, block), block.band)
            log_sum_exp = scores.logsumexp(-1)
            shares = _shares_(scores, log_sum_exp.unsqueeze(-1), weights)
            if weights is not None:
                shares.masked_fill_(weights.of(block).dropped().view(shares.shape), 0.0)
            return (shares.to(value.dtype) @ value.unsqueeze(2)).flatten(1, 2), log_sum_exp.flatten(1, 2)

        return forward_by_rows(compute, query, key, value, band, _heads_of_block(query, weights))

    def backward(
        self,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
        *,
        settings: AttentionSettings,
        band: Band,
        weights: KeptWeights | None = None,
        bias: torch.Tensor | None = None,
        grad_bias: torch.Tensor | None = None,
    ) -> Gradients:
        """See AttentionKernel and ``forward``; the gradient of the bias is added to ``grad_bias``."""

        def compute(
            block: Tile,
            grad_output: torch.Tensor,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            output: torch.Tensor,
            log_sum_exp: torch.Tensor,
        ) -> Gradients:
            scores = _capped_scores(query, key, settings)
            # The derivative of c * tanh(s / c) is 1 - tanh(s / c)^2.
            slope = None if settings.softcap is None else (scores / settings.softcap).square_().neg_().add_(1.0)
            log_sum_exp = _grouped(log_sum_exp.unsqueeze(-1), key)
            shares = _shares_(_hide_(_add_(scores, bias, block), block.band), log_sum_exp, weights)  # [B, G, R, Q, K]
            grad, grouped = _grouped(grad_output, key), _grouped(query, key)
            grad_shares = (grad @ value.unsqueeze(2).mT).to(shares.dtype)
            kept_shares = shares
            along = (grad_output.to(shares.dtype) * output).sum(-1, keepdim=True)
            if weights is not None:
                dropped = weights.of(block).dropped().view(shares.shape)
                kept_shares = shares.masked_fill(dropped, 0.0)
                grad_shares.masked_fill_(dropped, 0.0)
                # All shares are scaled up, also where the derivative of the softmax reads them without dropout.
                along.mul_(1.0 - weights.probability)
            grad_value = (kept_shares.to(grad.dtype).mT @ grad).sum(2)
            grad_scores = grad_shares.sub_(_grouped(along, key)).mul_(shares)
            if grad_bias is not None:
                grad_bias[_place(block)] += grad_scores.flatten(1, 2)
            if slope is not None:
                grad_scores.mul_(slope)
            grad_scores = grad_scores.mul_(settings.scale).to(query.dtype)
            grad_query = (grad_scores @ key.unsqueeze(2)).flatten(1, 2)
            return grad_query, (grad_scores.mT @ grouped).sum(2), grad_value

        tensors = (grad_output, query, key, value, output, log_sum_exp)
        return backward_by_rows(compute, tensors, band, _heads_of_block(query, weights))


def forward_by_rows(
    compute: ForwardBlock,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    band: Band,
    heads: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of all rows, computed by blocks of rows; ``heads``: of ``row_blocks``."""
    blocks = row_blocks(query.shape[2], key.shape[2], band, heads=heads)
    parts = [compute(block, query[block.queries], key[block.keys], value[block.keys]) for block in blocks]
    if len(parts) == 1:
        return parts[0]
    outputs, sums = zip(*parts, strict=True)
    return torch.cat(outputs, dim=2), torch.cat(sums, dim=2)


def backward_by_rows(
    compute: BackwardBlock, tensors: tuple[torch.Tensor, ...], band: Band, heads: int = 1
) -> Gradients:
    """Gradients of query, key and value, computed by blocks of rows; ``tensors``: arguments of a kernel's backward."""
    grad_output, query, key, value, output, log_sum_exp = tensors
    blocks = row_blocks(query.shape[2], key.shape[2], band, heads=heads)
    if len(blocks) == 1 and blocks[0].key == (0, key.shape[2]):
        return compute(blocks[0], *tensors)
    # Blocks share keys, so that their gradients are sums.
    grad_key, grad_value = (torch.zeros_like(heads, dtype=precise(heads.dtype)) for heads in (key, value))
    from_queries = []
    for block in blocks:
        at, keys = block.queries, block.keys
        from_query, from_key, from_value = compute(
            block, grad_output[at], query[at], key[keys], value[keys], output[at], log_sum_exp[at]
        )
        from_queries.append(from_query)
        grad_key[keys] += from_key
        grad_value[keys] += from_value
    return torch.cat(from_queries, dim=2), grad_key.to(key.dtype), grad_value.to(value.dtype)


def outside(band: Band, queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Mask [Q, K], True for a key that its query does not see."""
    everything = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if band.first is None:
        return everything.triu_(1 + band.last) if band.last is not None else everything.logical_not_()
    if band.last is None:
        return everything.tril_(band.first - 1)
    return everything.triu(1 + band.last).logical_or_(everything.tril_(band.first - 1))


def _grouped(heads: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """View [B, G, R, ...] of [B, A, ...]."""
    return heads.view(heads.shape[0], key.shape[1], -1, *heads.shape[2:])


def _heads_of_block(query: torch.Tensor, weights: KeptWeights | None) -> int:
    """Heads that share the scores of a block: with dropout all, so that masks are drawn in the cache."""
    return 1 if weights is None else query.shape[0] * query.shape[1]


def _shares_(scores: torch.Tensor, log_sum_exp: torch.Tensor, weights: KeptWeights | None) -> torch.Tensor:
    """Attention weights of ``scores``, in place; with dropout all are scaled up as those that are kept."""
    shift = log_sum_exp if weights is None else log_sum_exp - weights.log_scale
    return scores.sub_(shift).exp_()


def _capped_scores(query: torch.Tensor, key: torch.Tensor, settings: AttentionSettings) -> torch.Tensor:
    """Scaled and capped scores [B, G, R, Q, K], at least float32."""
    scores = _grouped(query * settings.scale, key) @ key.unsqueeze(2).mT
    scores = scores.to(precise(scores.dtype))
    if settings.softcap is not None:
        scores.div_(settings.softcap).tanh_().mul_(settings.softcap)
    return scores


def _place(block: Tile) -> tuple[slice, slice, slice, slice]:
    """Index of a block in a tensor [B, A, Q, K]."""
    return *block.queries, slice(*block.key)


def _add_(scores: torch.Tensor, bias: torch.Tensor | None, block: Tile) -> torch.Tensor:
    """Add the block's part of ``bias`` [B, A, Q, K] to its scores [B, G, R, Q, K], in place."""
    return scores if bias is None else scores.add_(bias[_place(block)].view(scores.shape))


def _hide_(scores: torch.Tensor, band: Band) -> torch.Tensor:
    """Set the scores outside the band to -inf, in place."""
    if band == FULL:
        return scores
    return scores.masked_fill_(outside(band, scores.shape[-2], scores.shape[-1], scores.device), -torch.inf)

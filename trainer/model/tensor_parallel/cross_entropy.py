"""Cross entropy over a vocabulary divided over tp.

The logits are never gathered, and their buffer becomes their gradient. Only a loss of the user's own gathers them.

Legend: S sequence, B micro-batch, N = S*B tokens, V padded vocabulary; ``/t`` = divided over tp.
Shoeybi et al. 2019 (arXiv:1909.08053), section 3: ranks exchange only per-token scalars, in two all-reduces: first the
maximum, then the sum of exponentials together with the logit of the label.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from trainer.model.tensor_parallel.collectives import TensorParallel
from trainer.ops.cross_entropy import CROSS_ENTROPY, LossTerms, VocabColumns, counted_from
from trainer.ops.dispatch.registry import Kernels

_REFERENCE_KERNELS, _NO_TERMS = Kernels(), LossTerms()


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    tp: TensorParallel,
    kernels: Kernels = _REFERENCE_KERNELS,
    terms: LossTerms = _NO_TERMS,
) -> torch.Tensor:
    """Loss [S, B] of every token, float32 (float64 for float64 logits). Collective: all tp ranks.

    Args:
        logits: [S, B, V/t], this rank's columns. Consumed: backward overwrites the buffer with the gradient, so that
            it can run only once, and nothing else may read them.
        labels: [S, B], numbers of the whole vocabulary; the same on every tp rank.
        vocab_size: vocabulary columns of all ranks; the padding after them never enters the softmax, and its
            gradient is zero. A rank may hold nothing but padding.
        tp: the tp axis.
        kernels: the kernel registry, which has the cross entropy.
        terms: additional terms of the loss, and the label of tokens without a loss.
    """
    width = logits.shape[-1]
    first = tp.rank * width
    columns = VocabColumns(first, min(max(vocab_size - first, 0), width), vocab_size)
    combine = None if tp.group is None else partial(_combine, tp.group)
    return kernels[CROSS_ENTROPY](logits, labels, columns, terms, combine)


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        ctx.first, ctx.width = tp.rank * local.shape[-1], local.shape[-1]
        parts = [torch.empty_like(local) for _ in range(tp.size)]
        dist.all_gather(parts, local.contiguous(), group=tp.group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        # All ranks compute the same loss, so that each has the whole gradient of its columns.
        return grad_output.narrow(-1, ctx.first, ctx.width), None


def gather_vocabulary(logits: torch.Tensor, vocab_size: int, tp: TensorParallel) -> torch.Tensor:
    """Logits [S, B, V] of the whole vocabulary, without padding, from every rank's [S, B, V/t].

    Collective: all tp ranks, which must all compute the same from the result.
    """
    if tp.group is not None:
        logits = _GatherColumns.apply(logits, tp)  # type: ignore[no-untyped-call]
    return logits[..., :vocab_size]


def _combine(
    group: dist.ProcessGroup, local_max: torch.Tensor, sums: torch.Tensor, columns: VocabColumns
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine the statistics of each rank's columns into those of all columns."""
    global_max = local_max.clone()
    dist.all_reduce(global_max, op=dist.ReduceOp.MAX, group=group)
    total = counted_from(global_max, local_max, sums, columns)
    dist.all_reduce(total, group=group)
    return global_max, total

"""Cross entropy over a vocabulary divided over tp: the logits are never gathered, and become their own gradient.

Legend: S sequence, B micro-batch, N = S*B tokens, V padded vocabulary; ``/t`` = divided over tp.
Shoeybi et al. 2019 (arXiv:1909.08053), section 3: only per-token scalars travel. Here in two all-reduces: the maximum,
then the sum of exponentials together with the logit of the label. Statistics are float32 whatever the logits are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from trainer.tensor_parallel.collectives import TensorParallel

# Logits handled at a time. On a CPU the rows stay in the cache between the passes: for 512 x 32000 float32 on one core
# of an AMD EPYC (1 MiB L2, 32 MiB L3) forward took 19.6 ms with 2 MiB, 21 with 0.5 or 8 MiB, 22.5 with all at once. On
# a GPU the launches count, and the float32 copy of 16-bit logits must fit: 512 MiB.
_CHUNK_ELEMENTS = {"cpu": 1 << 19}
_CHUNK_ELEMENTS_ELSEWHERE = 1 << 27


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, num_valid: int, tp: TensorParallel
    ) -> torch.Tensor:
        rows = logits.view(-1, logits.shape[-1])  # [N, V/t]
        columns = labels.reshape(-1, 1) - tp.rank * rows.shape[1]
        is_elsewhere = (columns < 0) | (columns >= num_valid)
        columns = columns.masked_fill(is_elsewhere, 0)
        stat_dtype = torch.promote_types(logits.dtype, torch.float32)
        label_logits = rows.gather(1, columns).to(stat_dtype)
        local_max, exp_sum = _exponentials(rows[:, :num_valid], stat_dtype)
        global_max = local_max
        if tp.group is not None:
            global_max = local_max.clone()
            dist.all_reduce(global_max, op=dist.ReduceOp.MAX, group=tp.group)
        # Everything is counted from the maximum: beside one of 10000 the logarithm of a sum would lose 13 of 24 bits.
        label_logits = label_logits.squeeze(1).sub_(global_max)
        if tp.group is not None:
            # A rank may hold padding only: then it has no maximum, no exponentials and no logit of a label.
            label_logits.masked_fill_(is_elsewhere.squeeze(1), 0.0)
            sums = torch.stack((exp_sum * torch.exp(local_max - global_max), label_logits))
            dist.all_reduce(sums, group=tp.group)
            exp_sum, label_logits = sums[0], sums[1]
        ctx.save_for_backward(logits, columns, is_elsewhere, local_max, global_max, exp_sum)
        ctx.num_valid = num_valid
        return (exp_sum.log() - label_logits).view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, columns, is_elsewhere, local_max, global_max, exp_sum = ctx.saved_tensors
        rows = logits.view(-1, logits.shape[-1])
        grad_losses = grad_output.reshape(-1, 1)
        shares = grad_losses / exp_sum.unsqueeze(1)
        _softmax_gradient_(rows[:, : ctx.num_valid], shares, local_max, global_max)
        rows[:, ctx.num_valid :].zero_()
        rows.scatter_add_(1, columns, grad_losses.masked_fill(is_elsewhere, 0.0).neg_().to(rows.dtype))
        # Detached, so that whoever keeps it for a while does not keep the graph that made the logits.
        return logits.detach(), None, None, None


def _chunk_rows(rows: torch.Tensor) -> int:
    return max(1, _CHUNK_ELEMENTS.get(rows.device.type, _CHUNK_ELEMENTS_ELSEWHERE) // max(1, rows.shape[1]))


def _exponentials(rows: torch.Tensor, stat_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum [N] of each row and the sum [N] of exp(logit - maximum).

    Rows that have ``stat_dtype`` are left as those exponentials, which saves backward to compute them again; 16-bit
    rows stay as they are, as the exponentials would lose digits in them.
    """
    if rows.shape[1] == 0:
        return rows.new_full((len(rows),), -torch.inf, dtype=stat_dtype), rows.new_zeros(len(rows), dtype=stat_dtype)
    maxima, sums = rows.new_empty(len(rows), dtype=stat_dtype), rows.new_empty(len(rows), dtype=stat_dtype)
    step = _chunk_rows(rows)
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step].to(stat_dtype)
        maximum = torch.amax(chunk, 1, keepdim=True)
        maxima[start : start + step] = maximum.squeeze(1)
        torch.sum(chunk.sub_(maximum).exp_(), 1, out=sums[start : start + step])
    return maxima, sums


def _softmax_gradient_(
    rows: torch.Tensor, shares: torch.Tensor, local_max: torch.Tensor, global_max: torch.Tensor
) -> None:
    """Overwrite what ``_exponentials`` left of the logits by exp(logit - global_max) * share."""
    if rows.dtype == global_max.dtype:
        rows.mul_(shares * torch.exp(local_max - global_max).unsqueeze(1))
        return
    step = _chunk_rows(rows)
    for start in range(0, len(rows), step):
        chunk = slice(start, start + step)
        rows[chunk] = (rows[chunk].float() - global_max[chunk, None]).exp_().mul_(shares[chunk])


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, num_valid: int, tp: TensorParallel
) -> torch.Tensor:
    """Loss [S, B] of every token, float32 (float64 for float64 logits). Collective: all tp ranks.

    Args:
        logits: contiguous [S, B, V/t], this rank's columns. Consumed: backward turns the buffer into its own gradient,
            so that they can be differentiated once, and nothing else may read them.
        labels: [S, B], numbers of the whole vocabulary; the same on every tp rank.
        num_valid: how many of this rank's columns are vocabulary rather than padding; may be 0. Padding never enters
            the softmax, and its gradient is zero.
        tp: the tp axis.
    """
    losses: torch.Tensor = _VocabParallelCrossEntropy.apply(logits, labels, num_valid, tp)  # type: ignore[no-untyped-call]
    return losses

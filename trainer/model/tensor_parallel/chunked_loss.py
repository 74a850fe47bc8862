"""Output layer and loss in chunks of tokens, so that the logits of a whole micro-batch are never held.

Backward computes the logits of each chunk again. Loss and gradient of the logits are those of the given function, chunk
by chunk, so that all its terms, kernels and collectives stay as they are.

Legend: S sequence, B micro-batch, N = S*B tokens, n tokens of a chunk, E width of the table, V padded vocabulary;
``/t`` = divided over tp. Under sequence parallelism the input is [S/t, B, E].
Hsu et al. 2024 (Liger Kernel, arXiv:2410.10989), FusedLinearCrossEntropy, but with the gradients in backward: only
then are the mask, the loss scale and the place of the weight's gradient known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from trainer.model.tensor_parallel.collectives import TensorParallel, gather_sequence, start_sum
from trainer.model.tensor_parallel.matrix_products import product

if TYPE_CHECKING:
    from trainer.model.tensor_parallel.linear import ColumnParallelLinear, WeightGradientAccumulator

LossOfLogits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits [n, V/t], labels [n]) -> losses [n], float32. May overwrite the logits; collective if the loss is."""


def chunked_losses(
    output: ColumnParallelLinear,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    loss_of: LossOfLogits,
    chunk_size: int,
    tp: TensorParallel,
) -> torch.Tensor:
    """Losses [S, B], float32, of the logits ``output(hidden)``.

    Collective: all tp ranks, in forward and backward.

    Args:
        output: the output layer, divided over ``tp``.
        hidden: [S(/t), B, E].
        labels: [S, B].
        loss_of: the loss, which must treat each token by itself.
        chunk_size: tokens whose logits are held at once.
        tp: the tp axis.
    """
    options = (labels.reshape(-1), loss_of, chunk_size, output.gradient_accumulator, tp)
    losses: torch.Tensor = _ChunkedLoss.apply(hidden, output.weight, output.bias, *options)  # type: ignore[no-untyped-call]
    return losses.view(labels.shape)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        loss_of: LossOfLogits,
        chunk_size: int,
        accumulator: WeightGradientAccumulator | None,
        tp: TensorParallel,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.loss_of, ctx.chunk_size, ctx.accumulator, ctx.tp = loss_of, chunk_size, accumulator, tp
        rows = _rows(gather_sequence(hidden, tp))
        chunks = _chunks(len(rows), chunk_size)
        return torch.cat([loss_of(product(rows[chunk], weight, bias), labels[chunk]) for chunk in chunks])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels = ctx.saved_tensors
        # Gathered again, since forward kept only the shard. Detached, because an accumulator may keep a part.
        whole = gather_sequence(hidden.detach(), ctx.tp)
        rows, grad_rows = _rows(whole), None
        if ctx.needs_input_grad[0]:
            grad_rows = torch.empty_like(rows)
        sums = _WeightSums(weight, bias, ctx.accumulator, ctx.needs_input_grad)
        for chunk in _chunks(len(rows), ctx.chunk_size):
            logits = product(rows[chunk], weight, bias).requires_grad_()
            with torch.enable_grad():
                losses = ctx.loss_of(logits, labels[chunk])
            (grad_logits,) = torch.autograd.grad(losses, logits, grad_losses[chunk])
            # Freed before the next chunk's logits.
            del logits, losses
            if grad_rows is not None:
                grad_rows[chunk] = product(grad_logits, weight.t())
            sums.add(grad_logits, rows[chunk], is_last=chunk.stop == len(rows))
            del grad_logits
        grad_hidden = None if grad_rows is None else start_sum(grad_rows.view(whole.shape), ctx.tp).result()
        return grad_hidden, sums.weight, sums.bias, None, None, None, None, None


class _WeightSums:
    """Gradients of weight and bias, summed over the chunks; None where the accumulator or nobody takes them."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        accumulator: WeightGradientAccumulator | None,
        needs_grad: tuple[bool, ...],
    ) -> None:
        self._accumulator = accumulator if needs_grad[1] else None
        self.weight = torch.zeros_like(weight) if needs_grad[1] and accumulator is None else None
        self.bias = torch.zeros_like(bias) if bias is not None and needs_grad[2] else None

    def add(self, grad_logits: torch.Tensor, rows: torch.Tensor, *, is_last: bool) -> None:
        """Add a chunk. ``is_last``: the last one of this micro-batch."""
        if self._accumulator is not None:
            add = self._accumulator.add_outer if is_last else self._accumulator.add_part_of_outer
            add(grad_logits, rows)
        elif self.weight is not None:
            self.weight.addmm_(grad_logits.t(), rows)
        if self.bias is not None:
            self.bias += grad_logits.sum(0)


def _rows(whole: torch.Tensor) -> torch.Tensor:
    """[S, B, E] as [N, E]."""
    return whole.reshape(-1, whole.shape[-1])


def _chunks(rows: int, size: int) -> Iterator[slice]:
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))

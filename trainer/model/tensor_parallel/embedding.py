"""The vocabulary table divided over tp by rows.

Legend: S sequence, B micro-batch, H hidden, V padded vocabulary; ``/t`` = divided over tp.
Shoeybi et al. 2019 (arXiv:1909.08053), section 3: each rank looks up the tokens that it holds and gives zeros for the
others; the sum over tp completes the result.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from trainer.model.tensor_parallel.collectives import TensorParallel, reduce_partial_sums


class RowGradientAccumulator(Protocol):
    """Takes the gradient of a table as its looked-up rows.

    The rest of the table is not touched.
    """

    def add_rows(self, rows: torch.Tensor, grad_rows: torch.Tensor) -> None:
        """Add ``grad_rows`` [N, H] to rows [N] of the table's gradient.

        A row may occur more than once.
        """


def add_to_rows(table: torch.Tensor, rows: torch.Tensor, addends: torch.Tensor) -> None:
    """Add ``addends`` [N, H] to rows [N] of ``table``, in place.

    Equal rows are added in a fixed order on any device.
    """
    addends = addends.to(table.dtype)
    if table.is_cuda:  # index_add_ adds in any order there; accumulating index_put_ sorts first
        table.index_put_((rows,), addends, accumulate=True)
    else:
        table.index_add_(0, rows, addends)


class _Lookup(torch.autograd.Function):
    """Rows of the local part of a table; zeros if ``is_elsewhere``."""

    @staticmethod
    def forward(
        ctx: Any,
        table: torch.Tensor,
        rows: torch.Tensor,
        is_elsewhere: torch.Tensor | None,
        accumulator: RowGradientAccumulator | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, is_elsewhere)
        ctx.accumulator, ctx.shape = accumulator, table.shape
        found = F.embedding(rows, table)
        return found if is_elsewhere is None else found.masked_fill_(is_elsewhere.unsqueeze(-1), 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        rows, is_elsewhere = ctx.saved_tensors
        if is_elsewhere is not None:
            grad_output = grad_output.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        grad_rows = grad_output.reshape(-1, grad_output.shape[-1])
        if ctx.accumulator is not None:
            ctx.accumulator.add_rows(rows.flatten(), grad_rows)
            return None, None, None, None
        # Summed in float32: in 16 bits the sum of a frequent token would stop growing after a few hundred additions.
        table = torch.zeros(ctx.shape, dtype=torch.float32, device=grad_rows.device)
        add_to_rows(table, rows.flatten(), grad_rows)
        return table.to(grad_rows.dtype), None, None, None


class VocabParallelEmbedding(nn.Module):
    """Tokens [S, B] -> [S(/t), B, H]. Each tp rank holds V/t rows of the table."""

    def __init__(self, weight: nn.Parameter, tp: TensorParallel):
        super().__init__()
        self.weight = weight
        self.row_accumulator: RowGradientAccumulator | None = None
        """Receives the table's gradient instead of ``weight.grad``."""
        self._tp = tp

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Collective: all tp ranks.

        Raises:
            IndexError: a token is beyond the table (on a GPU, torch's device-side assertion).
        """
        is_elsewhere = None
        if self._tp.size > 1:
            num_rows = self.weight.shape[0]
            owner = tokens.div(num_rows, rounding_mode="floor")
            # A token outside every rank's rows counts as this rank's: the lookup rejects it, as in one process.
            is_elsewhere = (owner != self._tp.rank) & (owner >= 0) & (owner < self._tp.size)
            tokens = (tokens - self._tp.rank * num_rows).masked_fill(is_elsewhere, 0)
        found: torch.Tensor = _Lookup.apply(self.weight, tokens, is_elsewhere, self.row_accumulator)  # type: ignore[no-untyped-call]
        return reduce_partial_sums(found, self._tp)

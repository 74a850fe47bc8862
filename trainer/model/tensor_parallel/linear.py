"""Linear layers with a weight divided over tp: by output (column) or by input (row).

Legend: S sequence, B micro-batch, N = S*B; ``/t`` = divided over tp. A weight is [out, in], or [2, out, in] for a
packed pair (gate and up of SwiGLU), which acts as [2*out, in].
Shoeybi et al. 2019 (arXiv:1909.08053), section 3: column then row needs one all-reduce per pair and direction.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from trainer.model.tensor_parallel.collectives import (
    TensorParallel,
    gather_sequence,
    reduce_partial_sums,
    start_gather,
    start_sum,
)
from trainer.model.tensor_parallel.matrix_products import product

_NO_TENSOR_PARALLEL = TensorParallel()


class WeightGradientAccumulator(Protocol):
    """Takes a weight gradient as the factors of its matrix product.

    The product itself can then accumulate.
    """

    def add_outer(self, grad_output: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add ``grad_output^T @ inputs`` to the gradient of a weight of out*in elements.

        The factors are [N, out] and [N, in]. One contribution, with the parts that came before.
        """

    def add_part_of_outer(self, grad_output: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add the product of some of the N tokens; ``add_outer`` with the last of them completes the contribution."""


class _Linear(torch.autograd.Function):
    """``inputs @ weight^T + bias``; for ``tp`` of size > 1 the input side is *f*. For passes with a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        accumulator: WeightGradientAccumulator | None,
        tp: TensorParallel,
        needs_values: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.accumulator, ctx.tp, ctx.has_bias = accumulator, tp, bias is not None
        if not needs_values:
            return inputs.new_empty((*inputs.shape[:-1], weight.shape[:-1].numel()))
        return _outputs(inputs, weight, bias, tp)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None, None]:
        inputs, weight = ctx.saved_tensors
        tp: TensorParallel = ctx.tp
        # Gathered again, since forward kept only the shard (Korthikanti et al. 2022, section 4.2.2). The gather
        # overlaps with the input gradient, and the input gradient's sum over tp overlaps with the weight gradient.
        gathering = start_gather(inputs.detach(), tp) if ctx.needs_input_grad[1] else None
        transposed = weight.flatten(0, -2).t()
        summing = start_sum(product(grad_output, transposed), tp) if ctx.needs_input_grad[0] else None
        grad_rows = grad_output.reshape(-1, grad_output.shape[-1])
        grad_weight = None
        if gathering is not None:
            # Detached, because an accumulator may defer the product, and must not keep the graph alive.
            whole = gathering.result()
            input_rows = whole.reshape(-1, whole.shape[-1])
            grad_weight = _weight_gradient(grad_rows, input_rows, weight, ctx.accumulator)
        grad_bias = grad_rows.sum(0).view(weight.shape[:-1]) if ctx.has_bias else None
        return (summing.result() if summing is not None else None), grad_weight, grad_bias, None, None, None


def _outputs(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: TensorParallel) -> torch.Tensor:
    return product(gather_sequence(inputs, tp), weight.flatten(0, -2), None if bias is None else bias.flatten())


def _weight_gradient(
    grad_rows: torch.Tensor,
    input_rows: torch.Tensor,
    weight: torch.Tensor,
    accumulator: WeightGradientAccumulator | None,
) -> torch.Tensor | None:
    if accumulator is not None:
        accumulator.add_outer(grad_rows, input_rows)
        return None
    return grad_rows.t().matmul(input_rows).view(weight.shape)


class ColumnParallelLinear(nn.Module):
    """[S(/t), B, in] -> [S, B, out/t]: the weight is divided by output.

    Each tp rank computes its share of the outputs from the whole input.

    Under sequence parallelism the input is divided along the sequence, and is gathered first.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, tp: TensorParallel):
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.gradient_accumulator: WeightGradientAccumulator | None = None
        """Receives the weight gradient instead of ``weight.grad``."""
        self._tp = tp

    def forward(self, inputs: torch.Tensor, inside_tp_region: bool = False, *, adds_bias: bool = True) -> torch.Tensor:
        """Collective: all tp ranks in backward, and in forward with sequence parallelism.

        ``inside_tp_region``: ``inputs`` are the whole output of enter_parallel_region, which is the collective instead.
        Without ``adds_bias`` the next op adds the bias.
        """
        tp, bias = _NO_TENSOR_PARALLEL if inside_tp_region else self._tp, self.bias if adds_bias else None
        if not torch.is_grad_enabled():
            # Generation computes one token at a time, where an autograd function costs as much as a small product.
            return _outputs(inputs, self.weight, bias, tp)
        outputs: torch.Tensor = _Linear.apply(inputs, self.weight, bias, self.gradient_accumulator, tp, True)  # type: ignore[no-untyped-call]
        return outputs


class RowParallelLinear(nn.Module):
    """[S, B, in/t] -> [S(/t), B, out]: the weight is divided by input.

    Each tp rank has a share of the inputs; the partial outputs are summed.

    Under sequence parallelism each rank gets its part of the sequence of the sum. The bias is added once, to the sum.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, tp: TensorParallel):
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.gradient_accumulator: WeightGradientAccumulator | None = None
        """Receives the weight gradient instead of ``weight.grad``."""
        self._tp = tp

    def forward(
        self, inputs: torch.Tensor, needs_values: bool = True, inside_tp_region: bool = False, *, adds_bias: bool = True
    ) -> torch.Tensor:
        """Collective: all tp ranks, unless ``needs_values`` is False: see trainer.model.recompute.Recomputable.

        ``inside_tp_region``: not collective; returns this rank's partial sum [S, B, out], for a reduce_partial_sums
        together with others. ``add_bias`` completes the sum. Without ``adds_bias`` the next op adds the bias.
        """
        is_undivided = self._tp.size == 1 and not inside_tp_region
        bias = self.bias if is_undivided and adds_bias else None
        partial: torch.Tensor
        if torch.is_grad_enabled() or not needs_values:
            partial = _Linear.apply(
                inputs, self.weight, bias, self.gradient_accumulator, _NO_TENSOR_PARALLEL, needs_values
            )  # type: ignore[no-untyped-call]
        else:
            partial = _outputs(inputs, self.weight, bias, _NO_TENSOR_PARALLEL)
        if is_undivided or inside_tp_region:
            return partial
        summed = reduce_partial_sums(partial, self._tp, needs_values)
        return self.add_bias(summed) if adds_bias else summed

    def add_bias(self, summed: torch.Tensor) -> torch.Tensor:
        """Add the bias to the sum over tp, in place."""
        return summed if self.bias is None else summed.add_(self.bias)

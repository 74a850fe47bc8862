"""Activations of feed-forward layers in Triton: the operation of trainer.kernels.activation, whole.

Legend: T any leading dims, F feed-forward width; I = 2F (gates, then ups) for gated activations, F for others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from trainer.kernels.activation import Activation
from trainer.kernels.gradients import differentiable_once
from trainer.kernels.triton.tiling import SUMMING_PROGRAMS, Tile, device_of, in_triton, wide_dtype

_WIDEST = 1024
"""Columns of a tile; there is nothing to know about a whole row."""


@triton.jit
def _function(x: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """The function and its derivative."""
    if KIND == "silu":
        sigmoid = 1.0 / (1.0 + tl.exp(-x))
        value = x * sigmoid
        slope = sigmoid * (1.0 + x * (1.0 - sigmoid))
    elif KIND == "gelu":
        below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))  # sqrt(1/2)
        value = x * below
        slope = below + x * tl.exp(-0.5 * x * x) * 0.3989422804014327  # 1/sqrt(2 pi)
    else:
        # tanh(u) = 2 sigmoid(2u) - 1, with u = sqrt(2/pi) (x + 0.044715 x^3). Where x^2 reaches 1e6 the function is
        # flat; a square that overflows times a slope of 0 would be NaN.
        square = tl.minimum(x * x, 1e6)
        sigmoid = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * x * (1.0 + 0.044715 * square)))
        value = x * sigmoid
        slope = sigmoid + value * (1.0 - sigmoid) * 1.5957691216057308 * (1.0 + 0.134145 * square)
    return value, slope


@triton.jit
def _biased(
    inner: tl.tensor,
    bias: tl.tensor,
    place: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:
    values = tl.load(inner + place, mask=inside, other=0.0).to(WIDE)
    if HAS_BIAS:
        values += tl.load(bias + column, mask=inside, other=0.0).to(WIDE)
    return values


@triton.jit
def _forward(
    inner: tl.tensor,
    bias: tl.tensor,
    row_weight: tl.tensor,
    activated: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < num_rows) & (column < width)
    start = row * width
    if GATED:
        start += start
    value, _ = _function(_biased(inner, bias, start + column, column, inside, HAS_BIAS, WIDE), KIND)
    if GATED:
        value *= _biased(inner, bias, start + width + column, width + column, inside, HAS_BIAS, WIDE)
    if HAS_WEIGHT:
        value *= tl.load(row_weight + row, mask=row < num_rows, other=0.0).to(WIDE)
    tl.store(activated + row * width + column, value.to(activated.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad_activated: tl.tensor,
    inner: tl.tensor,
    bias: tl.tensor,
    row_weight: tl.tensor,
    grad_inner: tl.tensor,
    partial_bias: tl.tensor,
    partial_weight: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Of every n-th tile of rows and the m-th of columns.

    partial_bias [n, I] are sums of the bias's gradients, partial_weight [m, T] those of the row weights'.
    """
    program, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    of_gates = tl.zeros([ROWS, COLUMNS], WIDE)
    of_ups = tl.zeros([ROWS, COLUMNS], WIDE)
    for first in range(program * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)[:, None].to(tl.int64)
        inside = (row < num_rows) & (column < width)
        start = row * width
        grads = tl.load(grad_activated + start + column, mask=inside, other=0.0).to(WIDE)
        if GATED:
            start += start
        value, slope = _function(_biased(inner, bias, start + column, column, inside, HAS_BIAS, WIDE), KIND)
        if GATED:
            up = _biased(inner, bias, start + width + column, width + column, inside, HAS_BIAS, WIDE)
        if HAS_WEIGHT:
            products = grads * value
            if GATED:
                products *= up
            tl.store(partial_weight + block * num_rows + row, tl.sum(products, 1, keep_dims=True), mask=row < num_rows)
            grads *= tl.load(row_weight + row, mask=row < num_rows, other=0.0).to(WIDE)
        grad_gate = grads * slope
        if GATED:
            grad_gate *= up
            grad_up = grads * value
            of_ups += grad_up
            tl.store(grad_inner + start + width + column, grad_up.to(grad_inner.dtype.element_ty), mask=inside)
        of_gates += grad_gate
        tl.store(grad_inner + start + column, grad_gate.to(grad_inner.dtype.element_ty), mask=inside)
    if HAS_BIAS:
        start_of_sums = program * width
        if GATED:
            start_of_sums += start_of_sums
            sums = partial_bias + start_of_sums + width + column
            tl.store(sums, tl.sum(of_ups, 0, keep_dims=True), mask=column < width)
        tl.store(partial_bias + start_of_sums + column, tl.sum(of_gates, 0, keep_dims=True), mask=column < width)


class _Call(NamedTuple):
    """The arguments of the operation."""

    inner: torch.Tensor
    bias: torch.Tensor | None
    row_weight: torch.Tensor | None
    kind: Activation
    gated: bool

    @property
    def pointers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a kernel is given; of what is not there it reads nothing."""
        inner, bias, row_weight, *_ = self
        return inner, inner if bias is None else bias, inner if row_weight is None else row_weight

    def constants(self, tile: Tile) -> dict[str, Any]:
        """What a kernel is compiled for."""
        return {
            "KIND": self.kind,
            "GATED": self.gated,
            "HAS_BIAS": self.bias is not None,
            "HAS_WEIGHT": self.row_weight is not None,
            "WIDE": in_triton(self.inner.dtype),
            "ROWS": tile.rows,
            "COLUMNS": tile.columns,
            "num_warps": tile.warps,
        }


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        tensors = [None if one is None else one.contiguous() for one in arguments[:3]]
        ctx.save_for_backward(*tensors)
        ctx.form = arguments[3:]
        activated: torch.Tensor = _launch_forward(*tensors, *ctx.form)
        return activated

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_activated: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = _launch_backward(grad_activated.contiguous(), *ctx.saved_tensors, *ctx.form)
        there = [None if one is None else grad for one, grad in zip(ctx.saved_tensors, grads, strict=True)]
        return *there, None, None


@torch.library.custom_op(
    "llmctl_triton::activation",
    mutates_args=(),
    schema="(Tensor inner, Tensor? bias, Tensor? row_weight, str kind, bool gated) -> Tensor",
)
def _launch_forward(*arguments: Any) -> torch.Tensor:
    call = _Call(*arguments)
    activated = _fake_forward(*arguments)
    if activated.numel():
        width = activated.shape[-1]
        rows = activated.numel() // width
        tile = Tile.of(rows, width, widest=_WIDEST)
        with device_of(activated):
            _forward[(triton.cdiv(rows, tile.rows), triton.cdiv(width, tile.columns))](
                *call.pointers, activated, rows, width, **call.constants(tile)
            )
    return activated


def _fake_forward(inner: torch.Tensor, _: Any, __: Any, ___: Any, gated: bool) -> torch.Tensor:
    return inner.new_empty((*inner.shape[:-1], inner.shape[-1] // 2 if gated else inner.shape[-1]))


_launch_forward.register_fake(_fake_forward)


@torch.library.custom_op(
    "llmctl_triton::activation_backward",
    mutates_args=(),
    schema="(Tensor grad_activated, Tensor inner, Tensor? bias, Tensor? row_weight, str kind, bool gated)"
    " -> (Tensor, Tensor, Tensor)",
)
def _launch_backward(grad_activated: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of inner, bias and row weights; empty for those that are not there."""
    call = _Call(*arguments)
    inner, bias, row_weight, *_ = call
    grad_inner, grad_bias, grad_row_weight = _fake_backward(grad_activated, *arguments)
    if not inner.numel():
        return grad_inner, grad_bias.zero_(), grad_row_weight.zero_()
    width = grad_activated.shape[-1]
    rows = grad_activated.numel() // width
    tile = Tile.of(rows, width, widest=_WIDEST)
    blocks, programs = triton.cdiv(width, tile.columns), triton.cdiv(rows, tile.rows)
    if bias is not None:
        programs = min(programs, triton.cdiv(4 * SUMMING_PROGRAMS, blocks))
    wide = wide_dtype(inner.dtype)
    partial_bias = inner.new_empty((0 if bias is None else programs, inner.shape[-1]), dtype=wide)
    partial_weight = inner.new_empty((0 if row_weight is None else blocks, rows), dtype=wide)
    with device_of(inner):
        _backward[(programs, blocks)](
            grad_activated,
            *call.pointers,
            grad_inner,
            partial_bias,
            partial_weight,
            rows,
            width,
            **call.constants(tile),
        )
    if bias is not None:
        grad_bias = partial_bias.sum(0).to(bias.dtype)
    if row_weight is not None:
        grad_row_weight = partial_weight.sum(0).view(row_weight.shape).to(row_weight.dtype)
    return grad_inner, grad_bias, grad_row_weight


def _fake_backward(
    _: torch.Tensor, inner: torch.Tensor, bias: torch.Tensor | None, row_weight: torch.Tensor | None, *__: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_bias, grad_row_weight = (
        inner.new_empty((0,)) if one is None else torch.empty_like(one) for one in (bias, row_weight)
    )
    return torch.empty_like(inner), grad_bias, grad_row_weight


_launch_backward.register_fake(_fake_backward)


def activation(*arguments: Any) -> torch.Tensor:
    """[T, F] from [T, I]: see trainer.kernels.activation."""
    activated: torch.Tensor = _Activation.apply(*arguments)  # type: ignore[no-untyped-call]
    return activated

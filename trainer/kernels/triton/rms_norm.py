"""RMSNorm, and of a sum, in Triton: the operations of trainer.kernels.rms_norm. A program holds whole rows.

Legend: T any leading dims, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from trainer.kernels.gradients import differentiable_once
from trainer.kernels.triton.tiling import SUMMING_PROGRAMS, Tile, device_of, in_triton, wide_dtype

WIDEST = 1 << 16
"""Channels of the widest rows. From 16384 on a program of 32 warps has more of them than its registers hold."""


@triton.jit
def _forward(
    hidden: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    normed: tl.tensor,
    scale: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    EPSILON: tl.constexpr,
    ADDS: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < num_rows) & (column < width)
    place = row * width + column
    values = tl.load(hidden + place, mask=inside, other=0.0)
    if ADDS:
        added = values.to(WIDE) + tl.load(residual + place, mask=inside, other=0.0).to(WIDE)
        # The norm is that of the sum as it is kept, so that backward sees what forward saw.
        values = added.to(hidden.dtype.element_ty)
        tl.store(total + place, values, mask=inside)
    values = values.to(WIDE)
    inverse = tl.rsqrt(tl.sum(values * values, 1, keep_dims=True) / width + EPSILON)
    tl.store(scale + row, inverse, mask=row < num_rows)
    weights = tl.load(weight + column, mask=column < width, other=0.0).to(WIDE)
    tl.store(normed + place, (values * inverse * weights).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad_normed: tl.tensor,
    grad_sum: tl.tensor,
    hidden: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    grad_hidden: tl.tensor,
    partial: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    HAS_SUM: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Of every n-th tile of rows, n the number of programs; partial [n, H] are the sums of the weight's gradients."""
    column = tl.arange(0, COLUMNS)[None, :]
    weights = tl.load(weight + column, mask=column < width, other=0.0).to(WIDE)
    of_weight = tl.zeros([ROWS, COLUMNS], WIDE)
    program = tl.program_id(0).to(tl.int64)
    for first in range(program * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)[:, None].to(tl.int64)
        inside = (row < num_rows) & (column < width)
        place = row * width + column
        inverse = tl.load(scale + row, mask=row < num_rows, other=0.0)
        unit = tl.load(hidden + place, mask=inside, other=0.0).to(WIDE) * inverse
        grads = tl.load(grad_normed + place, mask=inside, other=0.0).to(WIDE)
        products = grads * unit
        of_weight += products
        along = tl.sum(products * weights, 1, keep_dims=True) / width
        result = (grads * weights - unit * along) * inverse
        if HAS_SUM:
            result += tl.load(grad_sum + place, mask=inside, other=0.0).to(WIDE)
        tl.store(grad_hidden + place, result.to(grad_hidden.dtype.element_ty), mask=inside)
    tl.store(partial + program * width + column, tl.sum(of_weight, 0, keep_dims=True), mask=column < width)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        hidden = hidden.contiguous()
        found: tuple[torch.Tensor, ...] = _launch_forward(hidden, None, weight, epsilon)
        normed, _, scale = found
        ctx.save_for_backward(hidden, weight, scale)
        return normed

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_normed: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *_launch_backward(grad_normed, None, *ctx.saved_tensors), None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total, scale = _launch_forward(hidden.contiguous(), residual.contiguous(), weight, epsilon)
        ctx.save_for_backward(total, weight, scale)
        # What leads nowhere is None, and not read as zeros.
        ctx.set_materialize_grads(False)
        return normed, total

    @staticmethod
    @differentiable_once
    def backward(
        ctx: Any, grad_normed: torch.Tensor | None, grad_sum: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if grad_normed is None:
            return grad_sum, grad_sum, None, None
        grad_total, grad_weight = _launch_backward(grad_normed, grad_sum, *ctx.saved_tensors)
        return grad_total, grad_total, grad_weight, None


@torch.library.custom_op(
    "llmctl_triton::rms_norm",
    mutates_args=(),
    schema="(Tensor hidden, Tensor? residual, Tensor weight, float epsilon) -> (Tensor, Tensor, Tensor)",
)
def _launch_forward(
    hidden: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The norm [T, H] of contiguous tensors; the sum [T, H], empty where nothing is added; the scales [T]."""
    normed, total, scale = _fake_forward(hidden, residual)
    rows, width = len(scale), hidden.shape[-1]
    tile = Tile.of(rows, width, widest=WIDEST)
    if hidden.numel():
        with device_of(hidden):
            _forward[(triton.cdiv(rows, tile.rows),)](
                hidden,
                hidden if residual is None else residual,
                weight.contiguous(),
                total,
                normed,
                scale,
                rows,
                width,
                EPSILON=epsilon,
                ADDS=residual is not None,
                WIDE=in_triton(hidden.dtype),
                ROWS=tile.rows,
                COLUMNS=tile.columns,
                num_warps=tile.warps,
            )
    return normed, total, scale


def _fake_forward(
    hidden: torch.Tensor, residual: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = hidden.new_empty((0,)) if residual is None else torch.empty_like(hidden)
    rows = hidden.numel() // hidden.shape[-1] if hidden.shape[-1] else 0
    return torch.empty_like(hidden), total, hidden.new_empty((rows,), dtype=wide_dtype(hidden.dtype))


_launch_forward.register_fake(_fake_forward)


@torch.library.custom_op(
    "llmctl_triton::rms_norm_backward",
    mutates_args=(),
    schema="(Tensor grad_normed, Tensor? grad_sum, Tensor hidden, Tensor weight, Tensor scale) -> (Tensor, Tensor)",
)
def _launch_backward(
    grad_normed: torch.Tensor,
    grad_sum: torch.Tensor | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of hidden [T, H] and of weight [H]."""
    rows, width = scale.numel(), hidden.shape[-1]
    grad_hidden = torch.empty_like(hidden)
    if not hidden.numel():
        return grad_hidden, torch.zeros_like(weight)
    tile = Tile.of(rows, width, widest=WIDEST)
    programs = min(triton.cdiv(rows, tile.rows), SUMMING_PROGRAMS)
    partial = scale.new_empty((programs, width))
    with device_of(hidden):
        _backward[(programs,)](
            grad_normed.contiguous(),
            hidden if grad_sum is None else grad_sum.contiguous(),
            hidden,
            weight.contiguous(),
            scale,
            grad_hidden,
            partial,
            rows,
            width,
            HAS_SUM=grad_sum is not None,
            WIDE=in_triton(hidden.dtype),
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            num_warps=tile.warps,
        )
    return grad_hidden, partial.sum(0).to(weight.dtype)


def _fake_backward(
    _: torch.Tensor, __: torch.Tensor | None, hidden: torch.Tensor, weight: torch.Tensor, ___: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(hidden), torch.empty_like(weight)


_launch_backward.register_fake(_fake_backward)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """[T, H] -> [T, H], H at most ``WIDEST``."""
    normed: torch.Tensor = _RMSNorm.apply(hidden, weight, epsilon)  # type: ignore[no-untyped-call]
    return normed


def add_rms_norm(
    hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, H], [T, H] -> the norm of the sum, and the sum; H at most ``WIDEST``."""
    results: tuple[torch.Tensor, torch.Tensor] = _AddRMSNorm.apply(hidden, residual, weight, epsilon)  # type: ignore[no-untyped-call]
    return results

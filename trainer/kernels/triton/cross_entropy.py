"""The two halves of cross entropy in Triton: what trainer.kernels.cross_entropy puts together.

Legend: N tokens, V this rank's columns with padding.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from trainer.kernels.cross_entropy import LossTerms, VocabColumns
from trainer.kernels.triton.tiling import Tile, device_of, in_triton, wide_dtype

_WIDEST = 4096
"""Columns that a program holds at a time."""


@triton.jit
def _from(maximum: tl.tensor) -> tl.tensor:
    """What logits are counted from: -inf - -inf would be NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _stats(
    logits: tl.tensor,
    labels: tl.tensor,
    maximum: tl.tensor,
    sums: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    first_column: tl.tensor,
    num_valid: tl.tensor,
    vocab_size: tl.tensor,
    ignored: tl.tensor,
    SUMS_LOGITS: tl.constexpr,
    WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Of one row, a block of columns at a time; sums are counted from the largest logit so far."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * width
    label = tl.load(labels + row)
    # Rows with an ignored label are not read: their statistics are those of a single logit of 0.
    count = tl.where(label == ignored, 0, num_valid)
    largest = tl.full([], float("-inf"), WIDE)
    exp_sum = tl.full([], 0.0, WIDE)
    logit_sum = tl.full([], 0.0, WIDE)
    for first in range(0, count, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < count
        values = tl.load(start + column, mask=inside, other=float("-inf")).to(WIDE)
        before = largest
        largest = tl.maximum(before, tl.max(values, 0))
        values -= _from(largest)
        # Nothing that was counted is nothing still, however far the new maximum is from it.
        factor = tl.where(before == float("-inf"), 0.0, tl.exp(before - largest))
        exp_sum = exp_sum * factor + tl.sum(tl.where(inside, tl.exp(values), 0.0), 0)
        if SUMS_LOGITS:
            logit_sum += (_from(before) - _from(largest)) * first + tl.sum(tl.where(inside, values, 0.0), 0)
    place = label - first_column
    is_here = (place >= 0) & (place < num_valid) & (label != ignored)
    label_logit = tl.load(start + place, mask=is_here, other=0.0).to(WIDE)
    is_wrong = ((label < 0) | (label >= vocab_size)) & (label != ignored)
    tl.store(maximum + row, tl.where(label == ignored, 0.0, largest))
    tl.store(sums + row, tl.where(label == ignored, 1.0, exp_sum))
    tl.store(sums + (row + num_rows), tl.where(is_wrong, float("nan"), label_logit))
    if SUMS_LOGITS:
        tl.store(sums + (row + num_rows + num_rows), logit_sum)


@triton.jit
def _gradient(
    logits: tl.tensor,
    labels: tl.tensor,
    grad_losses: tl.tensor,
    global_max: tl.tensor,
    exp_sum: tl.tensor,
    width: tl.tensor,
    first_column: tl.tensor,
    num_valid: tl.tensor,
    ignored: tl.tensor,
    Z_LOSS: tl.constexpr,
    AT_LABEL: tl.constexpr,
    EVERYWHERE: tl.constexpr,
    WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Of one row and a block of columns, in place."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * width
    label = tl.load(labels + row)
    grad = tl.load(grad_losses + row)
    largest = tl.load(global_max + row)
    total = tl.load(exp_sum + row)
    share = grad / total
    if Z_LOSS != 0.0:
        share *= 1.0 + 2.0 * Z_LOSS * (largest + tl.log(total))
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_wanted = column < tl.where((label == ignored) | (grad == 0.0), 0, num_valid)
    values = tl.load(start + column, mask=is_wanted, other=0.0).to(WIDE)
    result = tl.exp(values - largest) * share
    if EVERYWHERE != 0.0:
        result -= grad * EVERYWHERE
    result -= tl.where(column == label - first_column, grad * AT_LABEL, 0.0)
    result = tl.where(is_wanted, result, 0.0)
    tl.store(start + column, result.to(logits.dtype.element_ty), mask=column < width)


def stats(
    rows: torch.Tensor, labels: torch.Tensor, columns: VocabColumns, terms: LossTerms
) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum [N] and the sums [2 or 3, N] of logits [N, V], which are left alone."""
    where = (columns.first, columns.num_valid, columns.vocab_size, terms.ignore_index)
    found: tuple[torch.Tensor, torch.Tensor] = _launch_stats(rows, labels, *where, terms.label_smoothing != 0.0)
    return found


@torch.library.custom_op(
    "llmctl_triton::cross_entropy_stats",
    mutates_args=(),
    schema="(Tensor rows, Tensor labels, int first, int num_valid, int vocab_size, int ignored, bool sums_logits)"
    " -> (Tensor, Tensor)",
)
def _launch_stats(
    rows: torch.Tensor,
    labels: torch.Tensor,
    first: int,
    num_valid: int,
    vocab_size: int,
    ignored: int,
    sums_logits: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    maximum, sums = _fake_stats(rows, labels, first, num_valid, vocab_size, ignored, sums_logits)
    if len(rows):
        tile = Tile.of(1, num_valid, widest=_WIDEST)
        with device_of(rows):
            _stats[(len(rows),)](
                rows,
                labels,
                maximum,
                sums,
                len(rows),
                rows.shape[1],
                first,
                num_valid,
                vocab_size,
                ignored,
                SUMS_LOGITS=sums_logits,
                WIDE=in_triton(rows.dtype),
                COLUMNS=tile.columns,
                num_warps=tile.warps,
            )
    return maximum, sums


def _fake_stats(rows: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    count, wide = rows.shape[0], wide_dtype(rows.dtype)
    sums_logits = options[-1]
    return rows.new_empty((count,), dtype=wide), rows.new_empty((3 if sums_logits else 2, count), dtype=wide)


_launch_stats.register_fake(_fake_stats)


def gradient_(
    rows: torch.Tensor,
    labels: torch.Tensor,
    grad_losses: torch.Tensor,
    global_max: torch.Tensor,
    exp_sum: torch.Tensor,
    columns: VocabColumns,
    terms: LossTerms,
) -> None:
    """Overwrite logits [N, V] by their gradient."""
    where = (columns.first, columns.num_valid, columns.vocab_size, terms.ignore_index)
    _launch_gradient_(rows, labels, grad_losses, global_max, exp_sum, *where, terms.z_loss, terms.label_smoothing)


@torch.library.custom_op(
    "llmctl_triton::cross_entropy_grad_",
    mutates_args=("rows",),
    schema="(Tensor(a!) rows, Tensor labels, Tensor grad_losses, Tensor global_max, Tensor exp_sum, int first,"
    " int num_valid, int vocab_size, int ignored, float z_loss, float smoothing) -> ()",
)
def _launch_gradient_(
    rows: torch.Tensor,
    labels: torch.Tensor,
    grad_losses: torch.Tensor,
    global_max: torch.Tensor,
    exp_sum: torch.Tensor,
    first: int,
    num_valid: int,
    vocab_size: int,
    ignored: int,
    z_loss: float,
    smoothing: float,
) -> None:
    if not rows.numel():
        return
    tile = Tile.of(1, rows.shape[1], widest=_WIDEST)
    with device_of(rows):
        _gradient[(len(rows), triton.cdiv(rows.shape[1], tile.columns))](
            rows,
            labels,
            grad_losses,
            global_max,
            exp_sum,
            rows.shape[1],
            first,
            num_valid,
            ignored,
            Z_LOSS=z_loss,
            AT_LABEL=1.0 - smoothing,
            EVERYWHERE=smoothing / vocab_size,
            WIDE=in_triton(rows.dtype),
            COLUMNS=tile.columns,
            num_warps=tile.warps,
        )


def _fake_gradient(*_: Any) -> None:
    return None


_launch_gradient_.register_fake(_fake_gradient)

"""Cross entropy of logits that may be vocabulary-parallel.

Backward overwrites the logits with their gradient.
Legend: N tokens, V this rank's columns with padding. With logZ = log(sum over the vocabulary of exp(logit)) the loss is

    logZ - (1 - label_smoothing) logit[label] - label_smoothing mean(logits) + z_loss logZ^2

(label smoothing: Szegedy et al. 2015, arXiv:1512.00567, section 7; z-loss: Chowdhery et al. 2022, arXiv:2204.02311,
section 5). With a softcap c all of it is of the logits c * tanh(logit / c). Forward computes statistics of the rank's
columns, which the ranks combine; backward computes the gradient.
Statistics are float32, or float64 for float64 logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from trainer.ops import cross_entropy_reference
from trainer.ops.autograd import differentiable_once
from trainer.ops.loss_terms import LossTerms, VocabColumns
from trainer.ops.operation import Implementation, Operation

__all__ = ["CROSS_ENTROPY", "Combine", "LossTerms", "VocabColumns", "counted_from"]

Combine = Callable[[torch.Tensor, torch.Tensor, VocabColumns], tuple[torch.Tensor, torch.Tensor]]
"""Reduction of statistics over the vocabulary. Collective: all ranks that share it."""


@dataclass(frozen=True)
class _Kernels:
    """Functions of one implementation.

    Attributes:
        stats: (logits [N, V], labels [N], columns, terms) -> maximum [N] of the valid logits, -inf without valid
            columns; and [2 or 3, N]: the sum of exp(logit - maximum), the label's logit or 0 if another rank has the
            label, and with label smoothing the sum of logit - maximum. May change the logits to the form that
            ``gradient_`` expects.
        gradient_: (logits, labels, gradients of the losses [N], this rank's maximum, the maximum over the vocabulary,
            the sum of exponentials relative to the latter, columns, terms): overwrites the logits with their gradient.
        losses: fused forward for a rank that holds the whole vocabulary; takes the arguments of ``stats`` and returns
            losses, maximum and sum of exponentials, [N] each. None: forward uses ``stats``.
    """

    stats: Callable[[torch.Tensor, torch.Tensor, VocabColumns, LossTerms], tuple[torch.Tensor, torch.Tensor]]
    gradient_: Callable[..., None]
    losses: (
        Callable[[torch.Tensor, torch.Tensor, VocabColumns, LossTerms], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
        | None
    ) = None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        columns: VocabColumns,
        terms: LossTerms,
        combine: Combine | None,
        kernels: _Kernels,
    ) -> torch.Tensor:
        logits, flat = logits.contiguous(), labels.reshape(-1).contiguous()
        rows = logits.view(-1, logits.shape[-1])
        if terms.softcap is not None:
            kernels = _REFERENCE_KERNELS
        if kernels.losses is not None and combine is None and columns.is_whole:
            losses, local_max, exp_sum = kernels.losses(rows, flat, columns, terms)
            global_max = local_max
        else:
            local_max, sums = kernels.stats(rows, flat, columns, terms)
            global_max, sums = (local_max, sums) if combine is None else combine(local_max, sums, columns)
            losses, exp_sum = _losses(global_max, sums, flat, columns, terms), sums[0]
        ctx.save_for_backward(logits, flat, local_max, global_max, exp_sum)
        ctx.columns, ctx.terms, ctx.kernels = columns, terms, kernels
        return losses.view(labels.shape)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        logits, labels, *statistics = ctx.saved_tensors
        rows, grad_losses = logits.view(-1, logits.shape[-1]), grad_output.reshape(-1).contiguous()
        ctx.kernels.gradient_(rows, labels, grad_losses, *statistics, ctx.columns, ctx.terms)
        # Detached: a gradient that is kept must not keep the graph of the logits alive.
        return logits.detach(), None, None, None, None, None


def _losses(
    maximum: torch.Tensor, sums: torch.Tensor, labels: torch.Tensor, columns: VocabColumns, terms: LossTerms
) -> torch.Tensor:
    """Losses [N] from statistics over the whole vocabulary."""
    log_sum = sums[0].log()
    # Relative to the maximum: added to a maximum of 10000, the logarithm of a sum would lose 13 of 24 bits.
    distances = maximum - sums[1]
    if terms.label_smoothing:
        mean = sums[2] / columns.vocab_size
        distances = distances * (1.0 - terms.label_smoothing) - mean * terms.label_smoothing
    losses = log_sum + distances
    if terms.z_loss:
        losses = losses + (log_sum + maximum).square() * terms.z_loss
    return losses.masked_fill_(labels == terms.ignore_index, 0.0)


def _cross_entropy(kernels: _Kernels) -> Callable[..., torch.Tensor]:
    def cross_entropy(
        logits: torch.Tensor,
        labels: torch.Tensor,
        columns: VocabColumns,
        terms: LossTerms,
        combine: Combine | None = None,
    ) -> torch.Tensor:
        """Losses of the labels' shape. Collective if ``combine`` is.

        The losses are float32, or float64 for float64 logits.

        Args:
            logits: [..., V]. Consumed: backward overwrites the buffer with the gradient. Nothing else may read the
                logits, and backward runs at most once.
            labels: [...] int64, vocabulary ids or ``ignore_index``. Any other label makes the loss NaN.
            columns: this rank's range of vocabulary columns.
            terms: label smoothing, z-loss and ignored label.
            combine: for vocabulary-parallel logits, reduces a rank's statistics to the maximum [N] and the sums
                [2 or 3, N] over the vocabulary; the first and third sums are relative to that maximum.
        """
        losses: torch.Tensor = _CrossEntropy.apply(logits, labels, columns, terms, combine, kernels)  # type: ignore[no-untyped-call]
        return losses

    return cross_entropy


def _small(
    logits: torch.Tensor,
    labels: torch.Tensor,
    columns: VocabColumns,
    terms: LossTerms,
    combine: Combine | None = None,
) -> torch.Tensor:
    """Compute with torch's cross_entropy, or with the reference for terms that torch lacks.

    torch's cross_entropy leaves the logits unchanged.
    """
    if combine is None and columns.is_whole and not _has_other_terms(terms):
        width = columns.num_valid
        # Slices and views without effect are skipped: at these sizes they cost as much as real operations.
        valid = logits if logits.shape[-1] == width else logits[..., :width]
        rows = valid if valid.dim() == 2 else valid.reshape(-1, width)
        try:
            losses = F.cross_entropy(
                rows if rows.dtype == torch.float64 else rows.float(),
                labels if labels.dim() == 1 else labels.reshape(-1),
                ignore_index=terms.ignore_index,
                reduction="none",
                label_smoothing=terms.label_smoothing,
            )
            return losses if labels.dim() == 1 else losses.view(labels.shape)
        except IndexError:  # a label outside the vocabulary, whose loss must be NaN
            pass
    return _REFERENCE(logits, labels, columns, terms, combine)


def _has_other_terms(terms: LossTerms) -> bool:
    """True if torch's cross_entropy lacks one of the terms."""
    return bool(terms.z_loss) or terms.softcap is not None


def counted_from(
    global_max: torch.Tensor, local_max: torch.Tensor, sums: torch.Tensor, columns: VocabColumns
) -> torch.Tensor:
    """Shift a rank's sums [2 or 3, N] from ``local_max`` to ``global_max``."""
    shift = cross_entropy_reference.shift(global_max, local_max)
    recounted = sums.clone()
    recounted[0].mul_(shift.exp())
    if len(sums) > 2:
        recounted[2].add_(shift, alpha=columns.num_valid)
    return recounted


def _native_stats(
    rows: torch.Tensor, labels: torch.Tensor, columns: VocabColumns, terms: LossTerms
) -> tuple[torch.Tensor, torch.Tensor]:
    sums: tuple[torch.Tensor, torch.Tensor] = torch.ops.llmctl.cross_entropy_stats(
        rows,
        labels,
        columns.first,
        columns.num_valid,
        columns.vocab_size,
        terms.ignore_index,
        terms.label_smoothing != 0.0,
        _keeps_exponentials(rows),
    )
    if _keeps_exponentials(rows):
        # Custom ops do not report in-place changes to autograd.
        torch.autograd.graph.increment_version(rows)
    return sums


def _native_losses(
    rows: torch.Tensor, labels: torch.Tensor, columns: VocabColumns, terms: LossTerms
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keeps_exponentials = _keeps_exponentials(rows)
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.llmctl.cross_entropy_losses(
        rows,
        labels,
        columns.vocab_size,
        terms.ignore_index,
        terms.z_loss,
        terms.label_smoothing,
        keeps_exponentials,
    )
    if keeps_exponentials:
        torch.autograd.graph.increment_version(rows)
    return found


def _native_gradient_(rows: torch.Tensor, *given: Any) -> None:
    *tensors, columns, terms = given
    torch.ops.llmctl.cross_entropy_grad_(
        rows,
        *tensors,
        columns.first,
        columns.num_valid,
        columns.vocab_size,
        terms.ignore_index,
        terms.z_loss,
        terms.label_smoothing,
        _keeps_exponentials(rows),
    )
    torch.autograd.graph.increment_version(rows)


def _keeps_exponentials(logits: torch.Tensor) -> bool:
    """True if forward overwrites valid logits with exp(logit - maximum) for backward.

    Backward then only scales them, which pays off on a CPU. A GPU computes exponentials faster than it writes them.
    16-bit dtypes lack the precision.
    """
    return logits.is_cpu and logits.dtype in (torch.float32, torch.float64)


def _example(
    tokens: int, vocabulary: int, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, VocabColumns, LossTerms]:
    logits = torch.randn((tokens, vocabulary + 3), generator=generator).to(device, dtype).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    labels[:3] = torch.tensor([0, vocabulary - 1, -100])
    return logits, labels.to(device), VocabColumns(0, vocabulary, vocabulary), LossTerms(0.01, 0.1)


def _divided_example(
    num_valid: int, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, VocabColumns, LossTerms, Combine]:
    """Arguments of the second of two ranks, with ``num_valid`` columns and padding."""
    logits = torch.randn((5, 40), generator=generator).to(device, dtype).requires_grad_()
    labels = torch.tensor([0, 23, 23 + num_valid, -100, 3])
    return logits, labels.to(device), VocabColumns(24, num_valid, 24 + num_valid), LossTerms(), _beside_zeros


def _beside_zeros(
    local_max: torch.Tensor, sums: torch.Tensor, columns: VocabColumns
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combined statistics of two ranks if the first rank's logits are all zero."""
    global_max = local_max.clamp(min=0.0)
    total = counted_from(global_max, local_max, sums, columns)
    total[0] += columns.first * (-global_max).exp()
    return global_max, total


_REFERENCE_KERNELS = _Kernels(cross_entropy_reference.stats, cross_entropy_reference.gradient_)
"""Also those of every backend with a softcap, which the native kernels lack."""
_REFERENCE = _cross_entropy(_REFERENCE_KERNELS)

CROSS_ENTROPY: Operation[Callable[..., torch.Tensor]] = Operation(
    "cross_entropy",
    {
        # Forward and backward on one core of an Intel Xeon, this kernel and torch's cross_entropy: float32 32 x 1024
        # 241 us and 213 us, 64 x 1024 294 us and 318 us; bfloat16 378 us and 360 us, 486 us and 568 us.
        "native": Implementation(
            _cross_entropy(_Kernels(_native_stats, _native_gradient_, _native_losses)), smallest={"cpu": 1 << 16}
        ),
        "reference": Implementation(_REFERENCE),
    },
    # The last example has whole vectors, and rows that are shared by a block of threads.
    [
        partial(_example, 5, 37),
        *(partial(_divided_example, num_valid) for num_valid in (0, 37)),
        partial(_example, 7, 8197),
    ],
    small=_small,
)

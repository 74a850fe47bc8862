"""Cross entropy of logits whose columns may be divided over ranks; the logits become their own gradient.

Legend: N tokens, V this rank's columns with padding. With logZ = log(sum over the vocabulary of exp(logit)) the loss is

    logZ - (1 - label_smoothing) logit[label] - label_smoothing mean(logits) + z_loss logZ^2

(label smoothing: Szegedy et al. 2015, arXiv:1512.00567, section 7; z-loss: Chowdhery et al. 2022, arXiv:2204.02311,
section 5). It is computed in two halves, between which ranks put their statistics together. Statistics are float32
whatever the logits are, of float64 logits float64.
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
from trainer.ops.bench_case import Bench, Case, Draw, Size
from trainer.ops.loss_terms import LossTerms, VocabColumns
from trainer.ops.operation import Implementation, Operation, compiled

__all__ = ["CROSS_ENTROPY", "Combine", "LossTerms", "VocabColumns", "counted_from"]

Combine = Callable[[torch.Tensor, torch.Tensor, VocabColumns], tuple[torch.Tensor, torch.Tensor]]
"""From a rank's statistics to those over the whole vocabulary; collective. See ``cross_entropy``."""


@dataclass(frozen=True)
class _Halves:
    """The two halves.

    Attributes:
        stats: (logits [N, V], labels [N], columns, terms) -> maximum [N] of the valid logits, -inf where there are
            none; and [2 or 3, N]: the sum of exp(logit - maximum), the label's logit or 0 where it is elsewhere, and
            with label smoothing the sum of logit - maximum. May change the logits to what ``gradient_`` wants.
        gradient_: (logits, labels, gradients of the losses [N], this rank's maximum, the maximum over the vocabulary,
            the sum of exponentials counted from it, columns, terms): overwrites the logits by their gradient.
        losses: the first half where no other rank has columns, from the arguments of ``stats``: losses, maximum and sum
            of exponentials, [N] each; None: they are put together from the statistics.
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
        halves: _Halves,
    ) -> torch.Tensor:
        logits, flat = logits.contiguous(), labels.reshape(-1).contiguous()
        rows = logits.view(-1, logits.shape[-1])
        if halves.losses is not None and combine is None and columns.is_whole:
            losses, local_max, exp_sum = halves.losses(rows, flat, columns, terms)
            global_max = local_max
        else:
            local_max, sums = halves.stats(rows, flat, columns, terms)
            global_max, sums = (local_max, sums) if combine is None else combine(local_max, sums, columns)
            losses, exp_sum = _losses(global_max, sums, flat, columns, terms), sums[0]
        ctx.save_for_backward(logits, flat, local_max, global_max, exp_sum)
        ctx.columns, ctx.terms, ctx.halves = columns, terms, halves
        return losses.view(labels.shape)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        logits, labels, *statistics = ctx.saved_tensors
        rows, grad_losses = logits.view(-1, logits.shape[-1]), grad_output.reshape(-1).contiguous()
        ctx.halves.gradient_(rows, labels, grad_losses, *statistics, ctx.columns, ctx.terms)
        # Detached, so that whoever keeps it for a while does not keep the graph that made the logits.
        return logits.detach(), None, None, None, None, None


def _losses(
    maximum: torch.Tensor, sums: torch.Tensor, labels: torch.Tensor, columns: VocabColumns, terms: LossTerms
) -> torch.Tensor:
    """[N], from statistics over the whole vocabulary."""
    log_sum = sums[0].log()
    # Counted from the maximum: beside one of 10000 the logarithm of a sum would lose 13 of 24 bits.
    distances = maximum - sums[1]
    if terms.label_smoothing:
        mean = sums[2] / columns.vocab_size
        distances = distances * (1.0 - terms.label_smoothing) - mean * terms.label_smoothing
    losses = log_sum + distances
    if terms.z_loss:
        losses = losses + (log_sum + maximum).square() * terms.z_loss
    return losses.masked_fill_(labels == terms.ignore_index, 0.0)


def _cross_entropy(halves: _Halves) -> Callable[..., torch.Tensor]:
    def cross_entropy(
        logits: torch.Tensor,
        labels: torch.Tensor,
        columns: VocabColumns,
        terms: LossTerms,
        combine: Combine | None = None,
    ) -> torch.Tensor:
        """Losses, of the labels' shape, float32 (float64 of float64 logits). Collective if ``combine`` is.

        Args:
            logits: [..., V]. Consumed: backward turns the buffer into its own gradient, so that they can be
                differentiated once, and nothing else may read them.
            labels: [...] int64, numbers of the vocabulary or ``ignore_index``; others make the loss NaN.
            columns: which columns these are.
            terms: what is added to the plain loss.
            combine: where the columns are divided over ranks, the maximum [N] over all of them and their sums
                [2 or 3, N], of which the first and the third are counted from that maximum.
        """
        losses: torch.Tensor = _CrossEntropy.apply(logits, labels, columns, terms, combine, halves)  # type: ignore[no-untyped-call]
        return losses

    return cross_entropy


def _small(
    logits: torch.Tensor,
    labels: torch.Tensor,
    columns: VocabColumns,
    terms: LossTerms,
    combine: Combine | None = None,
) -> torch.Tensor:
    """One operation of torch, which leaves the logits alone, where it has all that is asked for."""
    # Compiled code raises nothing for a label that there is not.
    if combine is None and columns.is_whole and not terms.z_loss and not torch.compiler.is_compiling():
        width = columns.num_valid
        # At these sizes an operation that changes nothing costs as much as one that does.
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
        except IndexError:  # of a label that there is not, whose loss is NaN
            pass
    return _REFERENCE(logits, labels, columns, terms, combine)


def counted_from(
    global_max: torch.Tensor, local_max: torch.Tensor, sums: torch.Tensor, columns: VocabColumns
) -> torch.Tensor:
    """A rank's sums [2 or 3, N] that were counted from ``local_max``; now ranks may add them up."""
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
        # The ops of a library do not tell autograd what they change.
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
    """Whether forward leaves exp(logit - maximum) in the place of valid logits, so that backward only scales them.

    On a CPU that is worth the write; a GPU computes exponentials faster than it writes them. 16 bits are too few.
    """
    return logits.is_cpu and logits.dtype in (torch.float32, torch.float64)


def register() -> None:
    """Tell torch.compile about the ops of the library, once it is loaded."""
    torch.library.register_fake("llmctl::cross_entropy_stats", _fake_stats)
    torch.library.register_fake("llmctl::cross_entropy_losses", _fake_losses)
    torch.library.register_fake("llmctl::cross_entropy_grad_", _fake_gradient)


def _fake_stats(logits: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(logits.dtype, torch.float32)
    sums_logits = options[5]
    return (
        logits.new_empty((logits.shape[0],), dtype=wide),
        logits.new_empty((3 if sums_logits else 2, logits.shape[0]), dtype=wide),
    )


def _fake_losses(logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return tuple(logits.new_empty((logits.shape[0],), dtype=wide) for _ in range(3))


def _fake_gradient(*_: Any) -> None:
    return None


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
    """One rank's columns, which follow another's: its own, or padding alone."""
    logits = torch.randn((5, 40), generator=generator).to(device, dtype).requires_grad_()
    labels = torch.tensor([0, 23, 23 + num_valid, -100, 3])
    return logits, labels.to(device), VocabColumns(24, num_valid, 24 + num_valid), LossTerms(), _beside_zeros


def _beside_zeros(
    local_max: torch.Tensor, sums: torch.Tensor, columns: VocabColumns
) -> tuple[torch.Tensor, torch.Tensor]:
    """What two ranks come to of which the other has the columns before, and nothing but zeros in them."""
    global_max = local_max.clamp(min=0.0)
    total = counted_from(global_max, local_max, sums, columns)
    total[0] += columns.first * (-global_max).exp()
    return global_max, total


def _plain(logits: torch.Tensor, labels: torch.Tensor, *_: Any) -> torch.Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="none")


def _case(size: Size, draw: Draw) -> Case:
    tokens, vocabulary = size
    logits = draw.leaf(tokens, vocabulary)
    labels = torch.randint(vocabulary, (tokens,), generator=draw.generator, device=draw.device)
    arguments = (logits, labels, VocabColumns(0, vocabulary, vocabulary), LossTerms())
    return Case(arguments, _plain, logits.nbytes, 2 * logits.nbytes)


_REFERENCE = _cross_entropy(_Halves(cross_entropy_reference.stats, cross_entropy_reference.gradient_))

CROSS_ENTROPY: Operation[Callable[..., torch.Tensor]] = Operation(
    "cross_entropy",
    {
        # Forward and backward on one core of an Intel Xeon, and by torch's one operation: float32 of 32 x 1024 241 us
        # and 213 us, of 64 x 1024 294 us and 318 us; bfloat16 378 us and 360 us, 486 us and 568 us.
        "native": Implementation(
            _cross_entropy(_Halves(_native_stats, _native_gradient_, _native_losses)), smallest={"cpu": 1 << 16}
        ),
        "compile": compiled(_REFERENCE),
        "reference": Implementation(_REFERENCE),
    },
    # The last: whole vectors, rows that a block of threads shares.
    [
        partial(_example, 5, 37),
        *(partial(_divided_example, num_valid) for num_valid in (0, 37)),
        partial(_example, 7, 8197),
    ],
    small=_small,
    register=register,
    bench=Bench("tokens x vocabulary", ((512, 32768), (64, 1024)), _case),
)

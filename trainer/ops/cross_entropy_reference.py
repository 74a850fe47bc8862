"""Reference forward and backward of cross entropy in torch. See trainer.ops.cross_entropy.

Legend: N tokens, V this rank's columns with padding.
"""

from __future__ import annotations

import torch

from trainer.ops.loss_terms import LossTerms, VocabColumns

# Logits per chunk. On a CPU the rows of a chunk stay in the cache between the passes: for 512 x 32000 float32 on one
# core of an AMD EPYC (1 MiB L2, 32 MiB L3) forward took 19.6 ms with 2 MiB per chunk, 21 ms with 0.5 or 8 MiB, and
# 22.5 ms without chunks. On a GPU few launches matter most, and the float32 copy of 16-bit logits must fit: 512 MiB.
_CHUNK_ELEMENTS = {"cpu": 1 << 19}
_CHUNK_ELEMENTS_ELSEWHERE = 1 << 27


def shift(global_max: torch.Tensor, local_max: torch.Tensor) -> torch.Tensor:
    """The shift [N] from ``local_max`` to ``global_max``.

    The shift is 0 on a rank without valid columns: its sums are 0.
    """
    return (local_max - global_max).masked_fill_(local_max == -torch.inf, 0.0)


def stats(
    rows: torch.Tensor, labels: torch.Tensor, columns: VocabColumns, terms: LossTerms
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the statistics of forward: ``stats`` of the kernels in trainer.ops.cross_entropy."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    positions, is_elsewhere = _positions(labels, columns)
    label_logits = _capped(rows.gather(1, positions).squeeze(1).to(wide), terms).masked_fill_(is_elsewhere, 0.0)
    label_logits.masked_fill_((labels < 0) | (labels >= columns.vocab_size), torch.nan)
    valid = rows[:, : columns.num_valid]
    maxima = rows.new_full((len(rows),), -torch.inf, dtype=wide)
    sums = rows.new_zeros((3 if terms.label_smoothing else 2, len(rows)), dtype=wide)
    sums[1] = label_logits
    if not columns.num_valid:
        return maxima, sums
    for chunk in _chunks(rows):
        values = _capped(valid[chunk].to(wide), terms)
        maximum = torch.amax(values, 1, keepdim=True)
        maxima[chunk] = maximum.squeeze(1)
        # Rows of -inf only are relative to 0: -inf - -inf would be NaN. float32 and float64 rows are left as
        # exponentials, which saves backward the recomputation; in 16 bits the exponentials would lose digits, and
        # backward of a softcap needs the logits.
        values.sub_(maximum.masked_fill_(maximum == -torch.inf, 0.0))
        if terms.label_smoothing:
            torch.sum(values, 1, out=sums[2, chunk])
        torch.sum(values.exp_(), 1, out=sums[0, chunk])
    return maxima, sums


def gradient_(
    rows: torch.Tensor,
    labels: torch.Tensor,
    grad_losses: torch.Tensor,
    local_max: torch.Tensor,
    global_max: torch.Tensor,
    exp_sum: torch.Tensor,
    columns: VocabColumns,
    terms: LossTerms,
) -> None:
    """Overwrite the logits with their gradient: ``gradient_`` of the kernels in trainer.ops.cross_entropy."""
    grads = grad_losses.masked_fill(labels == terms.ignore_index, 0.0)
    shares = grads / exp_sum
    if terms.z_loss:
        shares = shares * (1.0 + (2.0 * terms.z_loss) * (global_max + exp_sum.log()))
    valid = rows[:, : columns.num_valid]
    everywhere = (grads * (terms.label_smoothing / columns.vocab_size)).unsqueeze(1)
    positions, is_elsewhere = _positions(labels, columns)
    at_label = (grads * (terms.label_smoothing - 1.0)).masked_fill_(is_elsewhere, 0.0).unsqueeze(1)
    rows[:, columns.num_valid :].zero_()
    if rows.dtype == grads.dtype and terms.softcap is None:
        valid.mul_((shares * shift(global_max, local_max).exp()).unsqueeze(1))
        if terms.label_smoothing:
            valid.sub_(everywhere)
        rows.scatter_add_(1, positions, at_label)
        return
    for chunk in _chunks(rows) if columns.num_valid else ():
        values = _capped(valid[chunk].to(grads.dtype), terms)
        powers = (values - global_max[chunk, None]).exp_().mul_(shares[chunk, None])
        # Added before rounding to 16 bits: the gradient at a nearly certain label would round to 0.
        powers.sub_(everywhere[chunk]).scatter_add_(1, positions[chunk], at_label[chunk])
        if terms.softcap is not None:  # the derivative of c * tanh(x / c) is 1 - tanh(x / c)^2
            powers.addcmul_(powers, values.div_(terms.softcap).square_(), value=-1)
        valid[chunk] = powers


def _capped(values: torch.Tensor, terms: LossTerms) -> torch.Tensor:
    """New values under the softcap, or ``values`` themselves without a softcap."""
    return values if terms.softcap is None else (values / terms.softcap).tanh_().mul_(terms.softcap)


def _positions(labels: torch.Tensor, columns: VocabColumns) -> tuple[torch.Tensor, torch.Tensor]:
    """Local columns [N, 1] of the labels, and a mask [N] of other ranks' labels.

    Labels of other ranks have column 0.
    """
    positions = labels - columns.first
    is_elsewhere = (positions < 0) | (positions >= columns.num_valid)
    return positions.masked_fill_(is_elsewhere, 0).unsqueeze(1), is_elsewhere


def _chunks(rows: torch.Tensor) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS.get(rows.device.type, _CHUNK_ELEMENTS_ELSEWHERE) // max(1, rows.shape[1]))
    return [slice(start, start + size) for start in range(0, len(rows), size)]

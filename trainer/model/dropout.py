"""Dropout with the masks of the serial model on every layout.

Legend: S sequence, B micro-batch, H hidden; ``/t`` = divided over tp, ``/c`` over cp.
Srivastava et al. 2014, "Dropout", with the inverse scaling at training time.
"""

from __future__ import annotations

import torch

from trainer.distributed.random_streams import DropoutSite, MicroBatchRandomness
from trainer.model.context import ParallelAxes
from trainer.ops.bias_dropout_add import BIAS_DROPOUT_ADD
from trainer.ops.dispatch.registry import Kernels


def hidden_dropout(
    hidden: torch.Tensor,
    probability: float,
    randomness: MicroBatchRandomness | None,
    site: DropoutSite,
    axes: ParallelAxes,
    kernels: Kernels,
    layer: int = 0,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add ``bias`` [H] to [S/c(/t), B, H], drop entries, scale up the rest and add ``residual``.

    Without ``randomness`` nothing is dropped.

    Under sequence and context parallelism each rank draws the mask of its own part of the sequence only.
    """
    if randomness is None or probability == 0.0:
        hidden = hidden if bias is None else hidden + bias
        return hidden if residual is None else residual + hidden
    length = hidden.shape[0] * axes.cp.size * (axes.tp.size if axes.tp.sequence_parallel else 1)
    positions = axes.tp.sequence_shard(axes.cp.shard(torch.arange(length, device=hidden.device), 0))
    seed = randomness.dropout_seed(site, layer)
    return kernels[BIAS_DROPOUT_ADD](hidden, bias, residual, positions, probability, seed)


def draw_mask(shape: tuple[int, ...], probability: float, generator: torch.Generator) -> torch.Tensor:
    """True where an entry is kept."""
    return torch.empty(shape, dtype=torch.bool, device=generator.device).bernoulli_(
        1.0 - probability, generator=generator
    )


def apply_mask(values: torch.Tensor, kept: torch.Tensor, probability: float) -> torch.Tensor:
    """Set dropped entries of ``values`` to 0, and scale up the rest.

    The scale preserves the expectation.
    """
    return (values * kept) * (1.0 / (1.0 - probability))

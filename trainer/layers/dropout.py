"""Dropout whose masks are those of the serial model, however the activations are divided.

Legend: S sequence, B micro-batch, H hidden; ``/t`` = divided over tp, ``/c`` over cp.
Srivastava et al. 2014, "Dropout", with the inverse scaling at training time.
"""

from __future__ import annotations

import torch

from trainer.axes import ParallelAxes
from trainer.random_streams import DropoutSite, MicroBatchRandomness


def hidden_dropout(
    hidden: torch.Tensor,
    probability: float,
    randomness: MicroBatchRandomness | None,
    site: DropoutSite,
    axes: ParallelAxes,
    layer: int = 0,
) -> torch.Tensor:
    """Drop entries of [S/c(/t), B, H] and scale up the rest; the identity without ``randomness`` or probability.

    Under sequence and context parallelism each rank draws the mask of the whole sequence and takes its part, which
    costs that many times the drawing and makes the mask independent of the layout.
    """
    if randomness is None or probability == 0.0:
        return hidden
    length = hidden.shape[0] * axes.cp.size * (axes.tp.size if axes.tp.sequence_parallel else 1)
    generator = randomness.dropout_generator(hidden.device, site, layer)
    kept = draw_mask((length, *hidden.shape[1:]), probability, generator)
    return apply_mask(hidden, axes.tp.sequence_shard(axes.cp.shard(kept, 0)), probability)


def draw_mask(shape: tuple[int, ...], probability: float, generator: torch.Generator) -> torch.Tensor:
    """True where an entry is kept."""
    return torch.empty(shape, dtype=torch.bool, device=generator.device).bernoulli_(
        1.0 - probability, generator=generator
    )


def apply_mask(values: torch.Tensor, kept: torch.Tensor, probability: float) -> torch.Tensor:
    """``values`` where ``kept``, scaled so that their expectation stays."""
    return (values * kept) * (1.0 / (1.0 - probability))

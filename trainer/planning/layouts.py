"""Which divisions of the ranks into tensor and pipeline parallelism fit a model. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence


def fitting_layouts(world_size: int, tp_divides: Sequence[int], pp_divides: int) -> list[tuple[int, int]]:
    """Every (tp, pp) whose product divides ``world_size``, tp divides each of ``tp_divides`` and pp ``pp_divides``."""
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    return [
        (tp, pp)
        for tp in divisors
        for pp in divisors
        if world_size % (tp * pp) == 0 and pp_divides % pp == 0 and all(size % tp == 0 for size in tp_divides)
    ]


def nearest_layouts(
    world_size: int, tp: int, pp: int, tp_divides: Sequence[int], pp_divides: int
) -> list[tuple[int, int]]:
    """All fitting layouts, the nearest to the one asked for first.

    Distance is the sum of the ratios' logarithms, because halving and doubling are equally far; ties go to the smaller
    product. (1, 1) always fits, so the list is never empty.
    """

    def distance(layout: tuple[int, int]) -> tuple[float, int]:
        return abs(math.log(layout[0] / tp)) + abs(math.log(layout[1] / pp)), layout[0] * layout[1]

    return sorted(fitting_layouts(world_size, tp_divides, pp_divides), key=distance)

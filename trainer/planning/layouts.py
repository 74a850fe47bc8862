"""Search for tp, cp and pp sizes that fit a job. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Layout = tuple[int, int, int]
"""tp, cp, pp"""


def divisors_of(number: int) -> list[int]:
    """All divisors of a positive ``number``, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return [*small, *(number // d for d in reversed(small) if d * d != number)]


def nearest_layouts(world_size: int, asked: Layout, fits: Callable[[Layout], bool]) -> list[Layout]:
    """Layouts that fit and whose product divides ``world_size``, nearest to ``asked`` first.

    The distance is the sum of the absolute log ratios, so that halving and doubling are equally far. Ties go to the
    smaller product.
    """
    divisors = divisors_of(world_size)
    found = [
        (tp, cp, pp)
        for tp in divisors
        for cp in divisors
        if world_size % (tp * cp) == 0
        for pp in divisors
        if world_size % (tp * cp * pp) == 0 and fits((tp, cp, pp))
    ]

    def distance(layout: Layout) -> tuple[float, int]:
        ratios = (abs(math.log(size / wanted)) for size, wanted in zip(layout, asked, strict=True))
        return sum(ratios), math.prod(layout)

    return sorted(found, key=distance)


def multiples_around(number: int, step: int) -> str:
    """Multiples of ``step`` just below and above ``number``, as text."""
    below, above = number // step * step, -(-number // step) * step
    return f"{below} or {above}" if below else str(above)


def divisors(number: int) -> str:
    """Divisors of ``number`` as text; a long list keeps only the small ones."""
    return in_words(divisors_of(number))


def in_words(numbers: Sequence[int]) -> str:
    """Numbers as text; a long list keeps the small ones and the last."""
    return ", ".join(map(str, numbers if len(numbers) <= 12 else [*numbers[:11], "...", numbers[-1]]))

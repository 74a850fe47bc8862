"""Round numbers for the ticks of an axis, and their labels. Pure."""

import math

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0, 20.0)
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def round_ticks(low: float, high: float, most: int) -> list[float]:
    """At most ``most`` multiples of 1, 2, 2.5 or 5 times a power of ten, between two finite numbers."""
    # Halves: the difference of two large numbers would overflow.
    span = 2 * (high / 2 - low / 2)
    if not 0 < span < math.inf:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    for step in (power * step for step in _STEPS):
        first, last = math.ceil(low / step), math.floor(high / step)
        if last - first < most:
            return [number * step for number in range(first, last + 1)] or [low]
    return [low]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Exponents of the ticks between two exponents of ten: whole ones; of round numbers if they span less than two."""
    if high - low < 2:
        return [math.log10(value) for value in round_ticks(10.0**low, 10.0**high, most) if value > 0]
    step = max(1, math.ceil((high - low) / most))
    return [float(power) for power in range(math.ceil(low), math.floor(high) + 1, step)]


def tick_labels(values: list[float]) -> list[str]:
    """Short labels in one unit: ``0``, ``2.5k``, ``1e-05``; enough digits to tell neighbours apart."""
    largest = max((abs(value) for value in values), default=0.0)
    if largest and (largest < 1e-3 or largest >= 1e15):
        return [f"{value:.3g}" for value in values]
    scale, unit = next((pair for pair in _UNITS if largest >= 10 * pair[0]), (1.0, ""))
    digits = next((count for count in range(10) if _are_told_apart(values, scale, count)), 10)
    return [f"{value / scale:.{digits}f}{unit if value else ''}" for value in values]


def _are_told_apart(values: list[float], scale: float, digits: int) -> bool:
    gaps = [abs(after - before) for before, after in zip(values, values[1:], strict=False) if after != before]
    smallest = min(gaps, default=0.0) / scale
    return all(abs(round(value / scale, digits) - value / scale) <= smallest / 100 for value in values)

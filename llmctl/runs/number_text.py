"""Numbers of a training as short text, and sparklines. Pure."""

from collections.abc import Sequence

from llmctl.durations import short_duration

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-:=+*#"
FEWEST_VALUES = 3
"""Values of the shortest sparkline: two show nothing that their numbers do not."""


def loss_text(loss: float) -> str:
    """Four significant digits: ``3.210``, ``10.81``."""
    return f"{loss:#.4g}".rstrip(".")


def rate_text(per_s: float) -> str:
    """Three significant digits: ``512``, ``5.12k``, ``1.20M``."""
    rounded = float(f"{per_s:.3g}")
    scale, unit = next((pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if rounded >= pair[0]), (1.0, ""))
    return f"{rounded / scale:#.3g}".rstrip(".") + unit if rounded else "0"


def memory_text(size: float) -> str:
    """A size in bytes: ``612 MiB``, ``1.50 GiB``."""
    gib = size / (1 << 30)
    if gib < 1:
        return f"{size / (1 << 20):.0f} MiB"
    return f"{gib:#.3g} GiB".replace(". ", " ") if gib < 999.5 else f"{gib:.0f} GiB"


def iteration_time_text(seconds: float) -> str:
    """Three significant digits below 100 s: ``0.521 s``; ``2m05s`` above."""
    return f"{seconds:.3g} s" if seconds < 99.95 else short_duration(seconds)


def is_utf8(encoding: str | None) -> bool:
    """True if the name of an encoding is one of UTF-8."""
    return (encoding or "").lower().replace("-", "").replace("_", "") == "utf8"


def sparkline(values: Sequence[float | None], *, encoding: str | None) -> str:
    """One character per value, its height between the smallest and the largest one; a space for None.

    Empty for fewer than three values. Of ASCII characters if ``encoding`` is not UTF-8.
    """
    bars = BARS if is_utf8(encoding) else ASCII_BARS
    # Halves: the difference of two large numbers would overflow.
    halves = [None if value is None else value / 2 for value in values]
    known = [half for half in halves if half is not None]
    if len(known) < FEWEST_VALUES:
        return ""
    low, span = min(known), max(known) - min(known)
    if not span:
        return "".join(" " if half is None else bars[len(bars) // 2] for half in halves)
    heights = (None if half is None else round((half - low) / span * (len(bars) - 1)) for half in halves)
    return "".join(" " if height is None else bars[height] for height in heights)

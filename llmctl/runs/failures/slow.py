"""Ranks that are slower than others with the same work, from the heartbeats of a run. Pure.

All ranks take the same time for a step, so the time that a rank needs itself is its share of that time without waits.
A rank is slow if its share has been greater than that of the other ranks of its stage in each of the newest windows:
noise passes, a slow machine stays.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from llmctl.runs.facts import Heartbeat

WINDOWS = 4
"""Newest windows of 30 s (trainer/training/busy_share.py), all of which must show it."""
LEAST, LEAST_MEAN = 1.08, 1.12
"""Ratio to the other ranks in each window and on average. Of 600 samples a ratio has a standard deviation of 0.025."""
LEAST_SHARE = 0.2
"""Of a step in which every rank waits nearly all the time, ratios tell nothing."""
BUSY, LEAST_DIVISOR = 0.5, 0.01
"""A rank with this share works while the others wait for it, however much slower it is; and a share to divide by."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that needs ``ratio`` times the time of the others of its stage."""

    rank: int
    host: str
    ratio: float


def slow_ranks(heartbeats: Sequence[Heartbeat]) -> list[SlowRank]:
    """The slow ranks, the slowest first; none of a stage with a single rank."""
    stages: dict[int, list[Heartbeat]] = defaultdict(list)
    for beat in heartbeats:
        if beat.stage is not None and len(beat.busy) >= WINDOWS:
            stages[beat.stage].append(beat)
    found = []
    for beats in stages.values():
        for beat in beats:
            ratios = _ratios(beat, [other for other in beats if other is not beat])
            if ratios and min(ratios) >= LEAST and fmean(ratios) >= LEAST_MEAN:
                found.append(SlowRank(beat.rank, beat.host, fmean(ratios)))
    return sorted(found, key=lambda slow: (-slow.ratio, slow.rank))


def slow_words(heartbeats: Sequence[Heartbeat]) -> str:
    """One sentence on the slow ranks; empty without any."""
    found = slow_ranks(heartbeats)
    if not found:
        return ""
    named = ", ".join(f"rank {one.rank} on {one.host} ({one.ratio:.2f} times)" for one in found[:4])
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return f"slower than the other ranks of its stage for two minutes: {named}{more}"


def _ratios(beat: Heartbeat, others: Sequence[Heartbeat]) -> list[float]:
    """The rank's share in the median of the others', per window; empty without others that have work."""
    if not others:
        return []
    usual = [median(other.busy[-number] for other in others) for number in range(1, WINDOWS + 1)]
    if min(usual) < LEAST_SHARE and min(beat.busy[-WINDOWS:]) < BUSY:
        return []
    return [beat.busy[-number] / max(share, LEAST_DIVISOR) for number, share in enumerate(usual, start=1)]

"""The interval of saves that costs least, from the time of a save and the rate of faults. Pure.

A save costs time, and a fault costs the steps since the last one: J. W. Young, A first order approximation to the
optimum checkpoint interval, CACM 17(9), 1974; J. T. Daly, A higher order estimate of the optimum checkpoint interval
for restart dumps, FGCS 22(3), 2006, equation 37.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

PUBLISHED_FAULTS = 0.0042
"""Faults of a node per day: InfiniteHBD, SIGCOMM 2025, 400 nodes with 8 GPUs each over 348 days."""
FEWEST_FAULTS = 3
"""Faults from which the own rate is worth more than the published one."""
TWICE = 2.0
LEAST_GAIN = 0.001
"""Share of the time below which a better interval is not worth a word."""
RANDOM_CLASSES = frozenset(("killed", "lost_peer", "hang", "node", "unknown"))
"""Classes of failures that come from the machines, or cannot be told from these."""
_DAY_S = 86400.0


@dataclass(frozen=True)
class FaultCount:
    """Faults in a time of nodes.

    Attributes:
        faults: number of attempts that ended by one.
        node_days: of all attempts.
    """

    faults: int
    node_days: float

    def __add__(self, other: "FaultCount") -> "FaultCount":
        """Both together."""
        return FaultCount(self.faults + other.faults, self.node_days + other.node_days)

    @property
    def is_enough(self) -> bool:
        """True if a rate can be taken from these."""
        return self.faults >= FEWEST_FAULTS and self.node_days > 0


@dataclass(frozen=True)
class SaveAdvice:
    """Advice on checkpoint.save_interval.

    Attributes:
        interval: in use, in iterations; null if the run saves only at its end.
        advised: that costs least, in iterations.
        is_off: the interval in use is more than twice or less than half of it, and costs noticeably more.
        save_s: median time for which the training stands for a save.
        step_s: median time of an iteration.
        faults_per_node_day: rate of faults.
        faults: number that the rate is from; null for the published rate.
        mtbf_s: mean time between two faults of this job.
        cost: share of the time that saves and faults are expected to cost with the interval in use.
        advised_cost: the same with the advised one.
    """

    interval: int | None
    advised: int
    is_off: bool
    save_s: float
    step_s: float
    faults_per_node_day: float
    faults: int | None
    mtbf_s: float
    cost: float
    advised_cost: float


def advise(
    interval: int | None,
    train_iters: int,
    nodes: int,
    step_s: float,
    blocked_s: Sequence[float],
    written_s: Sequence[float],
    counted: FaultCount,
) -> SaveAdvice | None:
    """Advice on the interval of saves; None without a measured save or step.

    Args:
        interval: iterations between two saves; None: only the last one.
        train_iters: iterations of the run, the longest interval.
        nodes: of the job.
        step_s: seconds of an iteration.
        blocked_s: seconds for which the training stood, for each save.
        written_s: seconds until each of them was complete.
        counted: faults of earlier runs.
    """
    if not blocked_s or not step_s > 0 or nodes < 1:
        return None
    save_s, drain_s = median(blocked_s), median(written_s) if written_s else 0.0
    rate = counted.faults / counted.node_days if counted.is_enough else PUBLISHED_FAULTS
    mtbf_s = _DAY_S / (rate * nodes)
    # A save that is not complete protects nothing: the next one may begin only after it.
    best_s = max(optimal_interval_s(save_s, mtbf_s), drain_s - save_s)
    advised = min(max(1, round(best_s / step_s)), train_iters)
    used = min(interval or train_iters, train_iters)
    cost, least = (expected_cost(count * step_s, save_s, mtbf_s) for count in (used, advised))
    is_far = used > TWICE * advised or TWICE * used < advised
    faults = counted.faults if counted.is_enough else None
    is_off = is_far and cost - least >= LEAST_GAIN
    return SaveAdvice(interval, advised, is_off, save_s, step_s, rate, faults, mtbf_s, cost, least)


def optimal_interval_s(save_s: float, mtbf_s: float) -> float:
    """Seconds of training between two saves at which these and faults cost least together."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def expected_cost(interval_s: float, save_s: float, mtbf_s: float) -> float:
    """Share of the time that goes to saves, and to steps done again after faults; to first order."""
    return min(1.0, save_s / (interval_s + save_s) + (interval_s + save_s) / 2 / mtbf_s)

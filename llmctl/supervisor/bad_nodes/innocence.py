"""Statistical test by which a node is blamed for failures of unclear cause. Pure. Python 3.6."""

import math
from typing import Dict, List, NamedTuple, Sequence

from .ledger import FIRST, Row

MOST_CHANCE = 0.001
"""Chance of blaming any innocent node in one test of a history."""
LEAST_FAILURES = 3
"""Fewer failures are never a pattern."""


class Blame(NamedTuple):
    """A node that fails too often to be innocent.

    Attributes:
        node: its name.
        failures: runs that the node was the first to fail in.
        runs: runs on the node.
        rate: of failures on the other nodes, per run and node.
        chance: of so many failures by that rate, times the number of nodes.
    """

    node: str
    failures: int
    runs: int
    rate: float
    chance: float


def blamed(rows: Sequence[Row]) -> List[Blame]:
    """The nodes that are blamed, the least likely to be innocent first.

    A run counts once for each of its nodes, however often it was attempted: the attempts of a run fail together, for
    instance always on the node of rank 0. The rate of the other nodes is (failures + 1) / (runs + 1), an upper guess.
    The chance is the tail of the binomial distribution, multiplied by the number of nodes (Bonferroni).

    Args:
        rows: of the ledger.
    """
    runs: Dict[str, Dict[str, bool]] = {}
    for row in rows:
        of_node = runs.setdefault(row.node, {})
        of_node[row.run] = of_node.get(row.run, False) or row.end == FIRST
    failures = {node: sum(of_node.values()) for node, of_node in runs.items()}
    all_failures, all_runs = sum(failures.values()), sum(len(of_node) for of_node in runs.values())
    found = []
    for node, failed in failures.items():
        if failed < LEAST_FAILURES:
            continue
        count = len(runs[node])
        rate = min(1.0, (all_failures - failed + 1) / (all_runs - count + 1))
        chance = min(1.0, tail(failed, count, rate) * len(runs))
        if chance < MOST_CHANCE:
            found.append(Blame(node, failed, count, rate, chance))
    return sorted(found, key=lambda blame: (blame.chance, blame.node))


def tail(least: int, trials: int, rate: float) -> float:
    """Chance of ``least`` or more successes in independent trials of this rate, the binomial distribution's tail."""
    if least <= 0 or rate >= 1.0:
        return 1.0 if least <= trials else 0.0
    if rate <= 0.0:
        return 0.0
    terms = (
        math.lgamma(trials + 1)
        - math.lgamma(number + 1)
        - math.lgamma(trials - number + 1)
        + number * math.log(rate)
        + (trials - number) * math.log1p(-rate)
        for number in range(least, trials + 1)
    )
    return min(1.0, math.fsum(math.exp(term) for term in terms))

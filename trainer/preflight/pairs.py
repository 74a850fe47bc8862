"""All-reduces over pairs of nodes: their rounds, and the node that they name. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer.preflight.judgement import Finding, Trial

MOST_ROUNDS = 3
"""Rounds of pairs: each node meets so many others, which tells a bad node from its partners on any number of nodes."""
_WHAT = "sum over ranks (all-reduce)"
_REMEDY = "leave the node out with --exclude, and tell the administrators"


def rounds(nodes: int) -> list[list[tuple[int, ...]]]:
    """Groups of each round: first each node alone, then pairs by the circle method, in which nobody meets twice.

    With an odd number of nodes one node rests in each round.
    """
    found: list[list[tuple[int, ...]]] = [[(node,) for node in range(nodes)]]
    places: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    for _ in range(min(len(places) - 1, MOST_ROUNDS) if nodes > 1 else 0):
        half = len(places) // 2
        both = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in both if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return found


def judge_trials(whole: Trial, trials: Sequence[Trial], hosts: Mapping[int, tuple[int, str]]) -> list[Finding]:
    """Findings of an all-reduce over all ranks that failed, and of the trials that followed.

    A node is at fault if it fails alone, or with every partner while a partner of its own succeeds with others. Two
    nodes that only fail with each other are both told, and none is at fault.

    Args:
        whole: over all ranks.
        trials: over single nodes and pairs; none if the first one was right.
        hosts: number of a node -> its first rank and its machine's name.
    """
    if whole.is_right:
        return []
    bad = {node: trial for trial in trials for node in trial.nodes if len(trial.nodes) == 1 and not trial.is_right}
    pairs = [trial for trial in trials if len(trial.nodes) == 2 and not bad.keys() & set(trial.nodes)]
    right = {node for trial in pairs if trial.is_right for node in trial.nodes}
    failed = [trial for trial in pairs if not trial.is_right]
    for trial in failed:
        for node, partner in (trial.nodes, trial.nodes[::-1]):
            if node not in right and partner in right:
                bad.setdefault(node, trial)
    found = [_finding(node, trial, hosts) for node, trial in sorted(bad.items())]
    undecided = next((trial for trial in failed if not bad.keys() & set(trial.nodes)), None)
    if undecided is not None:
        first, second = undecided.nodes
        rank, host = hosts[first]
        remedy = "test the network between the two, or leave both out with --exclude"
        what = f"{_WHAT} with node {hosts[second][1]}"
        found.append(Finding(rank, host, what, undecided.words(), "the right sum", remedy))
    if not found:
        rank = min((rank for rank in whole.ranks if whole.problems.get(rank) != ""), default=0)
        host = next((name for least, name in sorted(hosts.values(), reverse=True) if least <= rank), "")
        remedy = "test the network of the nodes; all nodes succeed alone and all pairs tried do"
        found.append(Finding(rank, host, f"{_WHAT} over all ranks", whole.words(), "the right sum", remedy))
    return found


def _finding(node: int, trial: Trial, hosts: Mapping[int, tuple[int, str]]) -> Finding:
    rank, host = hosts[node]
    partner = next((hosts[other][1] for other in trial.nodes if other != node), "")
    what = f"{_WHAT} with node {partner}" if partner else f"{_WHAT} of the node alone"
    return Finding(rank, host, what, trial.words(), "the right sum", _REMEDY, culprits=(host,))

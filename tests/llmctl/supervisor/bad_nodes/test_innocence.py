"""The test by which a node is blamed for failures of unclear cause."""

import random

import pytest

from llmctl.supervisor.bad_nodes.innocence import blamed, tail
from llmctl.supervisor.bad_nodes.ledger import FIRST, OK, SILENCE, Row


def rows_of(counts):
    """Rows of nodes with so many runs, of which so many failed on the node first; node -> (failures, runs)."""
    return [
        Row(node, f"r{number}", 1, FIRST if number < failures else OK)
        for node, (failures, runs) in counts.items()
        for number in range(runs)
    ]


@pytest.mark.parametrize(
    ("counts", "names"),
    [
        ({}, []),
        ({"n1": (9, 9)}, []),
        ({"n1": (2, 2), "n2": (0, 500)}, []),
        ({"n1": (3, 20), "n2": (1, 20), "n3": (2, 20)}, []),
        ({"n1": (20, 20), "n2": (20, 20)}, []),
        ({"n1": (6, 20), "n2": (0, 200), "n3": (1, 200)}, ["n1"]),
        ({"n1": (8, 20), "n2": (9, 20), **{f"m{n}": (1, 100) for n in range(20)}}, ["n2", "n1"]),
    ],
)
def test_a_node_is_blamed_only_beyond_chance(counts, names):
    assert [blame.node for blame in blamed(rows_of(counts))] == names


def test_more_nodes_ask_for_more_evidence():
    few = {"n1": (3, 20), "n2": (0, 400)}
    assert blamed(rows_of(few))
    assert not blamed(rows_of({**few, **{f"m{n}": (0, 1) for n in range(200)}}))


def test_the_attempts_of_a_run_count_once():
    others = rows_of({"n2": (0, 200), "n3": (0, 200)})
    again = [Row("n1", "crashes", attempt, FIRST) for attempt in range(20)]
    assert blamed([*again, *others]) == []
    assert blamed([*(Row("n1", f"a{n}", 1, SILENCE) for n in range(20)), *others]) == []
    assert [blame.failures for blame in blamed([*(Row("n1", f"a{n}", 1, FIRST) for n in range(20)), *others])] == [20]


@pytest.mark.parametrize(
    ("least", "trials", "rate", "chance"),
    [(0, 5, 0.1, 1.0), (1, 2, 0.5, 0.75), (3, 3, 0.1, 0.001), (2, 1, 1.0, 0.0), (1, 1, 1.0, 1.0), (1, 9, 0.0, 0.0)],
)
def test_the_tail_is_that_of_the_binomial_distribution(least, trials, rate, chance):
    assert tail(least, trials, rate) == pytest.approx(chance)


def history(seed, *, bad=1.0, looks=False, nodes=16, runs=200, size=8, rate=0.02):
    """Nodes that are blamed in a history of runs, of which n0 fails ``bad`` times as often as the others.

    With ``looks``, the test is made after every failure, as the supervisor does, and the history ends with a blame.
    """
    chance, rows = random.Random(seed), []
    for run in range(runs):
        chosen = chance.sample(range(nodes), size)
        failed = [node for node in chosen if chance.random() < rate * (bad if node == 0 else 1)]
        first = chance.choice(failed) if failed else None
        rows += [Row(f"n{node}", f"r{run}", 1, FIRST if node == first else OK) for node in chosen]
        if looks and failed and (found := blamed(rows)):
            return {blame.node for blame in found}
    return {blame.node for blame in blamed(rows)}


def test_1000_histories_without_a_bad_node_blame_at_most_1_percent():
    assert sum(bool(history(seed)) for seed in range(1000)) <= 10


def test_the_test_after_every_failure_blames_hardly_more():
    assert sum(bool(history(seed, looks=True)) for seed in range(200)) <= 6


def test_a_node_that_fails_10_times_as_often_is_found():
    found = [history(seed, bad=10.0) for seed in range(100)]
    assert sum("n0" in names for names in found) >= 95
    assert sum(bool(names - {"n0"}) for names in found) <= 1

"""Slow ranks by the shares in their heartbeats."""

import random

import pytest

from llmctl.runs.facts import Heartbeat
from llmctl.runs.failures.slow import slow_ranks, slow_words

SAMPLES = 600


def beat(rank, *busy, stage=0):
    return Heartbeat(rank, f"n{rank}", 9, "optimizer", 1.0, stage=stage, busy=busy)


def test_a_rank_that_is_busier_in_every_window_is_named_with_its_host():
    beats = [beat(0, 0.7, 0.71, 0.7, 0.7), beat(1, 0.85, 0.84, 0.86, 0.85), beat(2, 0.71, 0.7, 0.69, 0.7)]
    assert slow_words(beats).endswith("of its stage for two minutes: rank 1 on n1 (1.21 times)")
    assert [one.rank for one in slow_ranks(beats[:2])] == [1]


def test_a_rank_that_the_others_wait_for_nearly_all_the_time_is_named():
    beats = [beat(0, 0.13, 0.14, 0.0, 0.12), beat(1, 0.93, 0.91, 0.94, 0.94)]
    assert [one.rank for one in slow_ranks(beats)] == [1]


@pytest.mark.parametrize(
    "beats",
    [
        [],
        [beat(0, 0.9, 0.9, 0.9, 0.9)],
        [beat(0, 0.7, 0.7, 0.7, 0.7), beat(1, 0.9, 0.7, 0.9, 0.9)],  # one window was as the others'
        [beat(0, 0.7, 0.7, 0.7), beat(1, 0.9, 0.9, 0.9)],  # too early
        [beat(0, 0.5, 0.5, 0.5, 0.5), beat(1, 0.9, 0.9, 0.9, 0.9, stage=1)],  # stages have other work
        [beat(0, 0.01, 0.01, 0.01, 0.01), beat(1, 0.02, 0.02, 0.02, 0.02)],  # all wait, for the disk or the network
        [beat(0), Heartbeat(1, "n1", 9, "optimizer", 1.0)],  # of an older version
    ],
)
def test_nobody_is_named_without_reason(beats):
    assert slow_words(beats) == ""


def _shares(rng, share):
    noisy = min(0.99, max(0.01, rng.gauss(share, 0.01)))
    return sum(rng.random() < noisy for _ in range(SAMPLES)) / SAMPLES


@pytest.mark.parametrize("size", [2, 4, 16])
def test_a_rank_slowed_1_2_times_is_named_and_clean_ones_are_not(size):
    """Simulated: samples as a rank takes them, and noise of the machine of one percent."""
    rng, rounds, right = random.Random(size), 60, 0
    for _ in range(rounds):
        clean = [beat(rank, *(_shares(rng, 0.72) for _ in range(4))) for rank in range(size)]
        assert slow_ranks(clean) == []
        slow = rng.randrange(size)
        beats = [beat(rank, *(_shares(rng, 0.86 if rank == slow else 0.72) for _ in range(4))) for rank in range(size)]
        right += [one.rank for one in slow_ranks(beats)] == [slow]
    assert right >= 0.97 * rounds

"""Advice on the interval of saves."""

import math
import random
from dataclasses import replace

import pytest

from llmctl.runs.costs.assess import count_faults
from llmctl.runs.costs.attempt_files import AttemptFiles
from llmctl.runs.costs.save_interval import FaultCount, advise, expected_cost, optimal_interval_s
from llmctl.runs.costs.words import advice_text
from llmctl.runs.facts import Ending, Started
from tests.llmctl.run_directories import make_run

NONE = FaultCount(0, 0.0)


@pytest.mark.parametrize("save_s", [0.01, 1.0, 60.0])
@pytest.mark.parametrize("mtbf_s", [3600.0, 1e6])
def test_the_interval_is_that_of_young_and_no_other_costs_less(save_s, mtbf_s):
    best = optimal_interval_s(save_s, mtbf_s)
    assert best == pytest.approx(math.sqrt(2 * save_s * mtbf_s), rel=0.1)
    least = expected_cost(best, save_s, mtbf_s)
    assert all(expected_cost(best * factor, save_s, mtbf_s) > least for factor in (0.5, 0.8, 1.25, 2.0))


def test_daly_bounds_the_interval_where_a_save_takes_as_long_as_a_fault_is_away():
    assert optimal_interval_s(200.0, 100.0) == 100.0
    # Table of the paper's order: 0.5 of the ratio is far below sqrt(2 x save x MTBF).
    assert optimal_interval_s(100.0, 100.0) == pytest.approx(
        100 * (math.sqrt(2) * (1 + math.sqrt(0.5) / 3 + 0.5 / 9) - 1)
    )


def lost_in_simulation(interval_s, save_s, mtbf_s, *, seed):
    """Share of the time lost, of a job with exponential times between faults."""
    chance, done, spent = random.Random(seed), 0.0, 0.0
    next_fault = chance.expovariate(1 / mtbf_s)
    while done < 2000 * interval_s:
        end = spent + interval_s + save_s
        if next_fault < end:
            spent, next_fault = next_fault, next_fault + chance.expovariate(1 / mtbf_s)
            continue
        spent, done = end, done + interval_s
    return 1 - done / spent


def test_the_expected_cost_is_that_of_a_simulated_job():
    save_s, mtbf_s = 5.0, 20_000.0
    best = optimal_interval_s(save_s, mtbf_s)
    for factor in (0.25, 1.0, 4.0):
        simulated = lost_in_simulation(best * factor, save_s, mtbf_s, seed=1)
        assert expected_cost(best * factor, save_s, mtbf_s) == pytest.approx(simulated, rel=0.15)


def test_advice_without_faults_takes_the_published_rate():
    advice = advise(10, 100_000, 16, 2.0, [20.0, 22.0, 300.0], [40.0], NONE)
    assert advice is not None and advice.is_off and advice.faults is None
    assert advice.mtbf_s == pytest.approx(86400 / (0.0042 * 16))
    assert advice.advised == round(optimal_interval_s(22.0, advice.mtbf_s) / 2)
    assert advice_text(advice) == (
        "checkpoint.save_interval 3,753 costs 0.58% of the time, save_interval 10 costs 52%: a save takes 22 s, "
        "an iteration 2 s; a fault every 14 d 21 h (0.0042 faults per node-day as published)"
    )


def test_own_faults_count_from_three_on():
    few, enough = FaultCount(2, 20.0), FaultCount(1, 10.0) + FaultCount(2, 20.0)
    assert advise(100, 10**6, 1, 1.0, [1.0], [1.0], few).faults_per_node_day == 0.0042
    found = advise(100, 10**6, 1, 1.0, [1.0], [1.0], enough)
    assert (found.faults_per_node_day, found.faults, found.mtbf_s) == (0.1, 3, 864_000)
    assert "from 3 faults of your runs here" in advice_text(found)


@pytest.mark.parametrize(("interval", "is_off"), [(1300, False), (1000, False), (100, True), (50_000, True)])
def test_only_more_than_twice_off_is_told(interval, is_off):
    assert advise(interval, 10**6, 1, 1.0, [1.0], [1.0], FaultCount(10, 100.0)).is_off is is_off


def test_a_short_run_needs_no_interval_and_a_save_must_end_before_the_next():
    assert advise(None, 500, 1, 1.0, [1.0], [1.0], NONE).advised == 500
    assert not advise(None, 500, 1, 1.0, [1.0], [1.0], NONE).is_off
    assert advise(10, 10**6, 1, 1.0, [0.001], [9000.0], NONE).advised == 9000
    assert advise(10, 500, 1, 1.0, [], [], NONE) is None
    assert advise(10, 500, 1, 0.0, [1.0], [1.0], NONE) is None


def test_faults_are_what_the_machines_did(tmp_path):
    record = replace(make_run(tmp_path).record, job={"nodes": 4})
    kinds = ("killed", "config", "disk", "error", "hang", "")
    attempts = [
        AttemptFiles(
            number,
            Started(1, "7", "n1", 1, 1, "boot", 1000.0 * number),
            Ending(1, "failed", None, 1000.0 * number + 864, failure_class=kind),
        )
        for number, kind in enumerate(kinds)
    ]
    cut_off = AttemptFiles(7, Started(1, "7", "n1", 1, 1, "boot", 9000.0), None, alive=9864.0)
    cancelled = AttemptFiles(8, None, None, names=("cancel",))
    assert count_faults(record, [*attempts, cut_off, cancelled, attempts[-1]]) == FaultCount(3, pytest.approx(0.32))
    # The last attempt of a run may still run.
    assert count_faults(record, [*attempts, cut_off]).faults == 2

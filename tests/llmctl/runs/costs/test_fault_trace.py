"""The replay of a trace of faults: every second is accounted for, and the decisions are the supervisor's."""

import json
import random

import pytest

from benchmarks.fault_trace import DAYS, Case, read_events, replay

CASE = Case(30, 10.0, 50.0, 1.0, 60.0)
DAY_S = 86400.0


def trace_of(folder, faults):
    """Events of faults as (node, day, days of repair), in the file's form."""
    events = []
    for node, day, repair in faults:
        events += [(day, node, "fault_start"), (day + repair, node, "fault_end")]
    path = folder / "fault_trace.json"
    values = [{"node_id": node, "event_time": day, "event_type": kind} for day, node, kind in sorted(events)]
    path.write_text(json.dumps(values))
    return read_events(path)


@pytest.fixture
def events(tmp_path):
    chance = random.Random(3)
    return trace_of(
        tmp_path, [(f"n{chance.randrange(400)}", chance.uniform(0, DAYS - 9), chance.uniform(0, 9)) for _ in range(600)]
    )


@pytest.mark.parametrize("nodes", [1, 200, 399])
def test_every_second_has_a_kind(events, nodes):
    found = replay(events, Case(nodes, 10.0, 50.0, 1.0, 60.0))
    assert found.wall + found.no_nodes == pytest.approx(DAYS * DAY_S)
    assert min(found.useful, found.saves, found.recovery) > 0 <= min(found.lost, found.by_hand, found.no_nodes)
    assert (found.no_nodes > 0) is (nodes == 399)
    assert found.faults == found.restarts + len(found.refused)


def test_the_budget_of_restarts_is_kept(events):
    found = replay(events, Case(200, 10.0, 50.0, 1.0, 60.0, max_restarts=20))
    assert found.restarts == 20 and "job.max_restarts 20 is used up" in found.refused
    assert found.by_hand > 0


def test_faults_at_one_time_end_one_attempt_and_those_of_each_start_are_a_crash_loop(tmp_path):
    whole = Case(400, 10.0, 50.0, 1.0, 60.0)
    at_once = trace_of(tmp_path, [(f"n{number}", 100.0, 0.00001) for number in range(8)])
    found = replay(at_once, whole)
    assert (found.faults, found.restarts, found.refused) == (1, 1, [])
    loop = trace_of(tmp_path, [(f"n{number}", 100.0 + number * 30 / DAY_S, 0.000001) for number in range(4)])
    assert "have trained and saved nothing beyond iteration" in replay(loop, whole).refused[0]


def test_a_node_that_fails_again_and_again_is_left_out_and_no_other_one(tmp_path):
    # Its repairs take no time, so that the job takes it again at once: all 400 nodes are the job's.
    bad = [("n7", 3.0 * number, 0.000001) for number in range(1, 100)]
    others = [(f"n{100 + number}", 3.0 * number + 1, 0.000001) for number in range(1, 100)]
    found = replay(trace_of(tmp_path, [*bad, *others]), Case(400, 10.0, 50.0, 1.0, 60.0))
    assert (found.left_out, found.innocent) == (["n7"], [])


def test_faults_by_chance_leave_no_node_out(events):
    found = replay(events, Case(300, 10.0, 50.0, 1.0, 60.0, wrong=0.5))
    assert found.faults > 100 and found.left_out == []


def test_more_faults_shorten_the_interval_of_saves(events):
    intervals = replay(events, CASE).intervals
    assert intervals[-1] != intervals[0] and min(intervals) > 0

"""The time of a run by kind, from handmade attempts and rows."""

import json
from dataclasses import fields, replace

import pytest

from llmctl.runs.costs.attempt_files import AttemptFiles
from llmctl.runs.costs.time_split import TimeSplit, split_time
from llmctl.runs.costs.words import attempt_text, cost_lines, ettr_text
from llmctl.runs.facts import Ending, RankError, Started
from llmctl.runs.record import Submission
from llmctl.runs.series.columns import parse_columns
from llmctl.runs.series.history import RunHistory


def started(time, *, submission=1, host="n1"):
    return Started(submission, "7", host, 1, 1, "boot", time)


def failed(number, began, ended, kind="killed", *, lost_steps=0, errors=(), **changes):
    ending = Ending(137, "failed", None, ended, "rank 1 was killed", failure_class=kind, lost_steps=lost_steps)
    return replace(AttemptFiles(number, started(began), ending, errors=errors), **changes)


def completed(number, began, ended):
    return AttemptFiles(number, started(began), Ending(0, "completed", None, ended))


def step(attempt, iteration, time, seconds=10.0):
    return {"attempt": attempt, "iteration": iteration, "iteration_time_s": seconds, "time": time}


def save(attempt, iteration, time, stage=1.0, wait=2.0):
    row = {"attempt": attempt, "iteration": iteration, "time": time, "save_bytes": 10}
    return {**row, "save_stage_s": stage, "save_wait_s": wait, "save_drain_s": 5.0}


def rows_of(*rows):
    history = RunHistory()
    history.add(parse_columns("".join(json.dumps(row) + "\n" for row in rows).encode(), ()))
    return history.attempts


RESUMED = rows_of(
    # The first step begins at 130; a save of 3 s after the second; iterations 3 and 4 are done again.
    *(step(1, 1, 140), step(1, 2, 150), save(1, 2, 153), step(1, 3, 163), step(1, 4, 173)),
    *(step(2, 3, 240), step(2, 4, 250), step(2, 5, 260), save(2, 5, 263)),
)
TWO = (failed(1, 100, 200), completed(2, 215, 270))
SENT = (Submission(1, 40.0),)


def seconds(split):
    return {each.name: getattr(split, each.name) for each in fields(TimeSplit) if getattr(split, each.name)}


def test_every_second_of_a_resumed_run_has_a_kind():
    costs = split_time("demo-1", TWO, RESUMED, SENT, is_running=False)
    first, second = costs.attempts
    assert seconds(first.time) == {
        **{"queue_s": 60, "start_s": 30, "steps_s": 20, "saves_s": 3, "lost_steps_s": 20, "end_s": 27},
    }
    assert seconds(second.time) == {"pause_s": 15, "start_s": 15, "steps_s": 30, "saves_s": 3, "end_s": 7}
    assert (first.lost_steps, first.lost_s, second.lost_steps, second.lost_s) == (2, 80, 0, 40)
    assert (costs.wall_s, costs.lost_s, costs.ettr) == (170, 120, 50 / 170)
    assert costs.ettr_with_queue == 50 / 230
    assert costs.time.total_s == 270 - 40
    assert ettr_text(costs) == (
        "29.4%: lost 2 min of 2 min: 45 s starts, 34 s ends, 20 s lost steps, 15 s between attempts, 6 s saves; "
        "21.7% with 60 s in the queue"
    )
    assert attempt_text(first) == "failed (killed), iterations 1 to 4, lost 2 steps and 80 s: rank 1 was killed"
    assert [name for name, _ in cost_lines(costs)] == ["ETTR", "attempt 1", "attempt 2"]


@pytest.mark.parametrize(
    ("kind", "error", "hang", "end"),
    [
        ("hang", None, 27, 0),
        ("error", ("n1", 190.0), 17, 10),
        # The clock of another host says nothing about times of this one.
        ("error", ("n2", 190.0), 0, 27),
        ("error", ("n1", 9999.0), 27, 0),
        ("error", ("n1", 1.0), 0, 27),
        ("killed", None, 0, 27),
    ],
)
def test_the_time_until_a_failure_was_seen(kind, error, hang, end):
    found = (RankError(1, "", error[0], 4, "RuntimeError", "boom", error[1]),) if error is not None else ()
    costs = split_time("demo-1", (failed(1, 100, 200, kind, errors=found), TWO[1]), RESUMED, SENT, is_running=False)
    assert (costs.attempts[0].time.hang_s, costs.attempts[0].time.end_s) == (hang, end)
    assert costs.time.total_s == 230


@pytest.mark.parametrize("skew", [-5000, -40, 40, 5000])
def test_a_clock_of_another_host_moves_no_time_into_or_out_of_an_attempt(skew):
    rows = rows_of(*(step(1, number, 130 + 10 * number + skew) for number in (1, 2, 3)))
    (attempt,) = split_time("demo-1", (completed(1, 100, 200),), rows, (), is_running=False).attempts
    time = attempt.time
    assert (time.steps_s, time.total_s) == (30, 100)
    assert min(time.start_s, time.end_s) >= 0


def test_the_last_failure_loses_the_steps_that_no_attempt_has_done_again():
    rows = rows_of(*(step(1, number, 130 + 10 * number) for number in (1, 2, 3, 4)))
    (attempt,) = split_time("demo-1", (failed(1, 100, 200, lost_steps=2),), rows, (), is_running=False).attempts
    assert (attempt.lost_steps, attempt.time.lost_steps_s, attempt.time.steps_s) == (2, 20, 20)


@pytest.mark.parametrize(("alive", "kinds"), [(185.0, {"steps_s": 55}), (400.0, {"steps_s": 40, "hang_s": 230})])
def test_a_running_attempt_waits_only_if_its_step_takes_far_too_long(alive, kinds):
    rows = rows_of(*(step(1, number, 130 + 10 * number) for number in (1, 2, 3, 4)))
    running = AttemptFiles(1, started(100), None, alive=alive)
    costs = split_time("demo-1", (running,), rows, (), is_running=True)
    assert seconds(costs.time) == {"start_s": 30, **kinds}
    assert costs.attempts[0].reason == "running"


def test_a_resubmission_divides_the_time_between_attempts():
    later = replace(TWO[1], started=started(215, submission=2))
    costs = split_time("demo-1", (TWO[0], later), RESUMED, (*SENT, Submission(2, 205.0)), is_running=False)
    assert (costs.attempts[1].time.pause_s, costs.attempts[1].time.queue_s) == (5, 10)
    assert costs.wall_s == 160


def test_an_attempt_without_a_step_was_a_start_and_a_command_has_no_ettr():
    attempts = (failed(1, 100, 160, "config"), AttemptFiles(2, None, None))
    costs = split_time("demo-1", attempts, {}, (), is_running=False)
    assert (costs.ettr, seconds(costs.time)) == (None, {"start_s": 60})
    costs = split_time("demo-1", attempts, {}, (), is_running=False, is_training=False)
    assert (costs.ettr, seconds(costs.time)) == (None, {"steps_s": 60})


def test_the_first_row_stands_for_all_steps_since_the_row_before():
    found = rows_of(step(1, 10, 240), step(1, 20, 340), step(1, 30, 440), step(2, 30, 640))
    assert (found[1].first_s, found[2].first_s) == (100, 100)
    # A run that began with a checkpoint of another one.
    assert rows_of(step(1, 1010, 240), step(1, 1020, 340))[1].first_s == 100
    assert rows_of(step(1, 1010, 240))[1].first_s == 10

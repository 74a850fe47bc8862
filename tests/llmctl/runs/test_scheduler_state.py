"""State of a run with a scheduler's job: every kind of answer."""

from dataclasses import replace

import pytest

from llmctl.backends.base import JobReport
from llmctl.job_state import JobState
from llmctl.runs.facts import AttemptFacts, Ending, Heartbeat, Outcome, RankError
from llmctl.runs.job_status import words_of
from llmctl.runs.state import JobAnswer, RunFacts, decide

NOW = 1_000_000.0


def queue(state, raw, **changes):
    report = JobReport("17", JobState(state), raw, **changes)
    return JobAnswer(report.state, words_of(report), source="queue", report=report)


SILENT = JobAnswer(JobState.UNKNOWN, "the scheduler does not answer: no route", source="queue", is_silent=True)
LEFT = JobAnswer(JobState.UNKNOWN, "the job has left the queue", source="queue", has_left=True)


def heartbeat(rank=0, age_s=3.0):
    return Heartbeat(rank, "n1", 7, "forward", NOW - age_s)


ALIVE = AttemptFacts(1, heartbeats=(heartbeat(),))
OLD = AttemptFacts(1, heartbeats=(heartbeat(age_s=3000),))
STOPPED = AttemptFacts(1, ending=Ending(0, "stopped", "TERM", NOW - 3), outcome=Outcome("stopped", 42, NOW - 4))


def facts(job, attempt=None, **changes):
    return replace(
        RunFacts("demo-1", job, NOW - 100, None, attempt, NOW, attempts=1, attempts_of_submission=1), **changes
    )


def state_and_detail(job, attempt=None, **changes):
    verdict = decide(facts(job, attempt, **changes))
    return verdict.state.value, verdict.detail


@pytest.mark.parametrize(
    ("job", "attempt", "expected"),
    [
        # Waiting, with the scheduler's reason and expected start.
        (queue("pending", "PD", reason="nodes are busy"), None, ("pending", "nodes are busy")),
        (queue("pending", "PD"), None, ("pending", "waiting in the queue (PD)")),
        (
            queue("pending", "PD", reason="nodes are busy", expected_start="2026-11-21T14:00:00"),
            None,
            ("pending", "nodes are busy; expected to start 2026-11-21T14:00:00"),
        ),
        # Running; before the first attempt, during an attempt, and restarted by the scheduler.
        (queue("running", "R"), None, ("running", "starting")),
        (queue("running", "R"), ALIVE, ("running", "")),
        (queue("running", "R", restarts=1), OLD, ("running", "starting again")),
        (queue("running", "R", restarts=1), ALIVE, ("running", "")),
        # An unknown word is shown unchanged; the heartbeat of a rank decides.
        (queue("unknown", "ZOMBIE"), None, ("unknown", "the scheduler says 'ZOMBIE'")),
        (queue("unknown", "ZOMBIE"), ALIVE, ("running", "heartbeat 3 s ago; the scheduler says 'ZOMBIE'")),
        # A scheduler that does not answer ends no run.
        (SILENT, None, ("unknown", "the scheduler does not answer: no route")),
        (SILENT, ALIVE, ("running", "heartbeat 3 s ago; the scheduler does not answer: no route")),
        (SILENT, OLD, ("unknown", "the scheduler does not answer: no route; last heartbeat 50 min ago")),
        # A missing queue entry or accounting entry ends no run.
        (LEFT, None, ("unknown", "the job has left the queue")),
        (LEFT, ALIVE, ("running", "heartbeat 3 s ago; the job has left the queue")),
        (LEFT, OLD, ("unknown", "the job has left the queue; last heartbeat 50 min ago")),
        # Ended without exit.json: the scheduler's report, and the last heartbeat.
        (
            queue("node_fail", "NODE_FAIL"),
            OLD,
            (
                "node_fail",
                "a node failed (NODE_FAIL) before exit.json could be written; last heartbeat 50 min ago; "
                "llmctl resume demo-1 continues from the latest checkpoint",
            ),
        ),
        (
            queue("timeout", "TIMEOUT"),
            OLD,
            (
                "timeout",
                "the scheduler ended it at its time limit (TIMEOUT) before exit.json could be written; "
                "last heartbeat 50 min ago; llmctl resume demo-1 continues from the latest checkpoint",
            ),
        ),
        (
            queue("preempted", "PREEMPTED"),
            AttemptFacts(1),
            (
                "preempted",
                "preempted by another job (PREEMPTED) before exit.json could be written; no heartbeat; "
                "llmctl resume demo-1 continues from the latest checkpoint",
            ),
        ),
        (
            queue("cancelled", "CANCELLED by 1001"),
            None,
            (
                "cancelled",
                "the job was cancelled, not by llmctl (CANCELLED by 1001) before it made an attempt; "
                "see llmctl logs demo-1 --job",
            ),
        ),
        (
            queue("failed", "OUT_OF_MEMORY", reason="it ran out of memory", exit_code=137),
            OLD,
            (
                "failed",
                "the job failed (OUT_OF_MEMORY: it ran out of memory), by signal 9 before exit.json could be written; "
                "last heartbeat 50 min ago",
            ),
        ),
        (
            queue("failed", "FAILED", exit_code=3),
            None,
            (
                "failed",
                "the job failed (FAILED), with exit code 3 before it made an attempt; see llmctl logs demo-1 --job",
            ),
        ),
        (
            queue("failed", "FAILED", exit_code=137),
            AttemptFacts(1, outcome=Outcome("stopped", 50, NOW - 2)),
            (
                "failed",
                "stopped at iteration 50 according to the trainer; the job failed (FAILED), by signal 9 before "
                "exit.json could be written; llmctl resume demo-1 continues",
            ),
        ),
        (
            queue("cancelled", "CANCELLED by 1001"),
            AttemptFacts(1, outcome=Outcome("stopped", 50, NOW - 2)),
            (
                "cancelled",
                "stopped at iteration 50 according to the trainer; the job was cancelled, not by llmctl (CANCELLED by "
                "1001) before exit.json could be written; llmctl resume demo-1 continues",
            ),
        ),
        (
            queue("completed", "COMPLETED", exit_code=0),
            AttemptFacts(1),
            ("completed", "the scheduler reports success (COMPLETED); there is no exit.json"),
        ),
    ],
)
def test_state_for_every_answer(job, attempt, expected):
    assert state_and_detail(job, attempt) == expected


def test_the_first_error_is_reported_with_the_schedulers_word():
    error = RankError(3, "", "n2", 7, "ValueError", "loss is NaN", NOW - 9)
    state, detail = state_and_detail(queue("failed", "FAILED"), AttemptFacts(1, errors=(error,)))
    assert (state, detail.split("; ")[-1]) == ("failed", "rank 3 on n2: ValueError: loss is NaN")


@pytest.mark.parametrize(
    ("ending", "outcome", "expected"),
    [
        (
            Ending(0, "timeout", None, NOW),
            Outcome("stopped", 42, NOW),
            ("timeout", "reached its time limit, saved at iteration 42; llmctl resume demo-1 continues"),
        ),
        (
            Ending(143, "timeout", "USR1", NOW),
            None,
            ("timeout", "reached its time limit; llmctl resume demo-1 continues"),
        ),
        (Ending(0, "completed", "TERM", NOW), None, ("completed", "")),
        (Ending(143, "cancelled", "TERM", NOW), None, ("cancelled", "cancelled")),
        (Ending(1, "failed", None, NOW), None, ("failed", "ended with exit code 1")),
    ],
)
@pytest.mark.parametrize("job", [None, queue("running", "CG"), SILENT, LEFT, queue("pending", "PD")])
def test_exit_json_decides_if_the_scheduler_did_not_stop_the_run(ending, outcome, expected, job):
    assert state_and_detail(job, AttemptFacts(1, ending=ending, outcome=outcome)) == expected


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (
            queue("pending", "PD", reason="its start time has not come"),
            (
                "pending",
                "its start time has not come; the scheduler has stopped it (stopped at iteration 42, saved)",
            ),
        ),
        (queue("running", "R", restarts=1), ("running", "starting again")),
        (queue("running", "CG", restarts=0), ("running", "ending")),
        (
            SILENT,
            (
                "unknown",
                "stopped at iteration 42, saved; whether the scheduler starts it again is not known: "
                "the scheduler does not answer: no route",
            ),
        ),
        (LEFT, ("cancelled", "stopped at iteration 42, saved; llmctl resume demo-1 continues")),
        (
            queue("cancelled", "CANCELLED by 0"),
            ("cancelled", "stopped at iteration 42, saved; llmctl resume demo-1 continues"),
        ),
        (
            queue("preempted", "PREEMPTED"),
            (
                "preempted",
                "preempted by another job (PREEMPTED); stopped at iteration 42, saved; llmctl resume demo-1 continues",
            ),
        ),
        (
            queue("timeout", "TIMEOUT"),
            (
                "timeout",
                "the scheduler ended it at its time limit (TIMEOUT); stopped at iteration 42, saved; "
                "llmctl resume demo-1 continues",
            ),
        ),
    ],
)
def test_a_run_stopped_by_its_scheduler_may_start_again(job, expected):
    assert state_and_detail(job, STOPPED) == expected


def test_a_cancelled_run_does_not_start_again():
    assert state_and_detail(queue("pending", "PD"), STOPPED, cancel_requested=NOW - 9)[0] == "cancelled"


def test_grid_engine_restarts_a_job_with_exit_code_99():
    again = AttemptFacts(1, ending=Ending(99, "failed", None, NOW))
    assert state_and_detail(queue("pending", "qw"), again)[0] == "pending"
    assert state_and_detail(LEFT, again) == ("failed", "ended with exit code 99")


@pytest.mark.parametrize(
    ("job", "attempt", "expected"),
    [
        (queue("pending", "PD", reason="busy"), None, ("pending", "cancel requested 5 s ago")),
        (queue("running", "R"), ALIVE, ("running", "cancel requested 5 s ago")),
        (queue("cancelled", "CANCELLED by 0"), None, ("cancelled", "cancelled before it began")),
        (
            queue("failed", "FAILED", exit_code=143),
            OLD,
            ("cancelled", "cancelled; job.sh ended before exit.json could be written"),
        ),
        (queue("completed", "COMPLETED"), AttemptFacts(1), ("completed", None)),
        (LEFT, None, ("cancelled", "cancelled before it began")),
        (LEFT, OLD, ("cancelled", "cancelled; the job has left the queue")),
        (LEFT, ALIVE, ("running", None)),
        (SILENT, OLD, ("unknown", None)),
    ],
)
def test_a_run_with_a_cancel_request(job, attempt, expected):
    state, detail = state_and_detail(job, attempt, cancel_requested=NOW - 5)
    assert state == expected[0]
    assert expected[1] in (None, detail)

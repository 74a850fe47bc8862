"""State of a run whose job begins a failed attempt again: decided purely."""

from dataclasses import replace

import pytest

from llmctl.job_state import JobState
from llmctl.runs.facts import AttemptFacts, Ending, parse_ending
from llmctl.runs.state import JobAnswer, RunFacts, decide

NOW = 1_000_000.0
CAUSE = "rank 1 on n2 was ended by signal 9"
AGAIN = Ending(137, "failed", None, NOW - 3, CAUSE, restarts=True, most_attempts=4)
RUNNING = JobAnswer(JobState.RUNNING, "pid 7")
LEFT = JobAnswer(JobState.UNKNOWN, "the job has left the queue", source="queue", has_left=True)


def facts(job, **changes):
    run = RunFacts("demo-1", job, NOW - 100, None, AttemptFacts(1, ending=AGAIN), NOW)
    return replace(run, **changes)


@pytest.mark.parametrize(
    ("job", "state", "detail"),
    [
        (RUNNING, "running", f"starting again (attempt 2 of at most 4): {CAUSE}"),
        (replace(RUNNING, source="queue"), "running", f"starting again (attempt 2 of at most 4): {CAUSE}"),
        (JobAnswer(JobState.PENDING, "Priority", source="queue"), "pending", "Priority"),
        (
            JobAnswer(JobState.UNKNOWN, "squeue hangs", source="queue", is_silent=True),
            "unknown",
            f"squeue hangs; was to start again after: {CAUSE}",
        ),
        (LEFT, "failed", f"{CAUSE}; the job ended before it could start again (the job has left the queue)"),
        (
            JobAnswer(JobState.FAILED, "job.sh (pid 7) was killed"),
            "failed",
            f"{CAUSE}; the job ended before it could start again (job.sh (pid 7) was killed)",
        ),
        (
            JobAnswer(JobState.NODE_FAIL, "a node failed", source="accounting"),
            "node_fail",
            f"{CAUSE}; the job ended before it could start again (a node failed)",
        ),
        (None, "failed", f"{CAUSE}; the job ended before it could start again"),
    ],
)
def test_between_two_attempts(job, state, detail):
    verdict = decide(facts(job))
    assert (verdict.state, verdict.detail) == (state, detail)


def test_a_cancel_between_two_attempts():
    assert decide(facts(RUNNING, cancel_requested=NOW - 5)).detail == "cancel requested 5 s ago"
    assert decide(facts(LEFT, cancel_requested=NOW - 5)).state is JobState.CANCELLED


def test_the_reason_of_the_last_attempt_stands_beside_the_cause():
    last = Ending(137, "failed", None, NOW - 3, CAUSE, not_restarted="job.max_restarts 3 is used up")
    verdict = decide(facts(RUNNING, attempt=AttemptFacts(4, ending=last)))
    assert verdict.detail == f"{CAUSE}; not started again: job.max_restarts 3 is used up"


def test_exit_json_is_not_final_while_the_job_goes_on():
    found = parse_ending(b'{"code": 1, "reason": "failed", "restarts": true, "most_attempts": 3, "class": "error"}')
    assert found is not None and not found.is_final
    assert (found.most_attempts, found.failure_class, found.lost_steps) == (3, "error", None)

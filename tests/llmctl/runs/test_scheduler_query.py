"""Queries to a scheduler: valid answers, retries, and unknown states."""

import time

import pytest

from llmctl.errors import SchedulerError
from llmctl.job_state import JobState
from llmctl.runs.scheduler_query import RetryPolicy, find_job, read_accounting, read_queue
from llmctl.transport.local import LocalTransport
from tests.standins.scripted_scheduler import ScriptedBackend

TRANSPORT = LocalTransport({"PATH": "/usr/bin:/bin"})


@pytest.fixture
def backend(tmp_path):
    return ScriptedBackend(tmp_path)


@pytest.fixture
def pauses():
    return []


@pytest.fixture
def retries(pauses):
    return RetryPolicy(sleep=pauses.append)


def test_all_jobs_are_queried_in_one_call(backend, retries):
    backend.says("queue", "17|RUNNING", "18|PENDING|job-b|nodes are busy|tomorrow||")
    answer = read_queue(backend, ["17", "18", "19"], TRANSPORT, retries)
    assert backend.calls() == ["queue 17 18 19"]
    assert answer.is_answer
    assert {job: report.state for job, report in answer.reports.items()} == {
        "17": JobState.RUNNING,
        "18": JobState.PENDING,
    }


def test_no_jobs_make_no_query(backend, retries):
    assert read_queue(backend, [], TRANSPORT, retries).is_answer
    assert read_accounting(backend, [], TRANSPORT, retries).is_answer
    assert backend.calls() == []


def test_transient_failures_are_retried_a_few_times(backend, retries, pauses):
    backend.says("queue", "17|RUNNING")
    backend.fails("queue", "the server is busy")
    backend.does("queue", 'if (( $(wc -l <"$1/calls") == 3 )); then rm "$1/queue.error"; fi')
    assert read_queue(backend, ["17"], TRANSPORT, retries).reports["17"].state is JobState.RUNNING
    assert (len(backend.calls()), pauses) == (3, [1.0, 3.0])


def test_a_failed_query_quotes_the_scheduler(backend, retries, pauses):
    backend.fails("queue", "reading the configuration\nthe server is busy")
    answer = read_queue(backend, ["17"], TRANSPORT, retries)
    assert (answer.is_answer, answer.problem, dict(answer.reports)) == (False, "the server is busy", {})
    assert len(backend.calls()) == 3
    backend.fails("queue", "refused")
    assert read_queue(backend, ["17"], TRANSPORT, retries).problem == "refused; ask the one who wrote this"
    assert len(backend.calls()) == 4, "a permanent failure is not retried"
    assert pauses == [1.0, 3.0]


def test_an_unknown_job_is_a_valid_answer(backend, retries):
    backend.says("queue")
    backend.fails("queue", "no such job: 17")
    answer = read_queue(backend, ["17"], TRANSPORT, retries)
    assert (answer.is_answer, dict(answer.reports)) == (True, {})


def test_a_missing_or_hanging_command_gives_no_answer(backend, retries, pauses, monkeypatch):
    monkeypatch.setattr(ScriptedBackend, "status_argv", lambda *_: ["/no/such/squeue"])
    answer = read_queue(backend, ["17"], TRANSPORT, retries)
    assert not answer.is_answer
    assert "/no/such/squeue" in answer.problem

    class Hanging:
        def run(self, *_, timeout_s):
            raise SchedulerError(f"no answer within {timeout_s:g} s", transient=True)

    assert "no answer within 90 s" in read_queue(backend, ["17"], Hanging(), retries).problem
    assert pauses == [1.0, 3.0]


def test_clients_that_waited_long_are_not_retried(backend, retries, pauses, monkeypatch):
    clock = iter((0.0, 11.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))

    class Slow:
        def run(self, *_, **__):
            raise SchedulerError("no answer within 60 s", transient=True)

    assert not read_queue(backend, ["17"], Slow(), retries).is_answer
    assert pauses == []


def test_accounting_is_absent_or_gives_an_answer(backend, retries, tmp_path):
    backend.says("accounting", "17|NODE_FAIL")
    assert read_accounting(backend, ["17"], TRANSPORT, retries).reports["17"].state is JobState.NODE_FAIL
    without = ScriptedBackend(tmp_path, has_accounting=False)
    assert read_accounting(without, ["17"], TRANSPORT, retries).problem == "this scheduler has no accounting"


def test_a_lost_job_is_found_by_its_name(backend, retries):
    backend.says("queue", "16|CANCELLED|job-a", "17|PENDING|job-a", "18|RUNNING|job-b")
    report, answer = find_job(backend, "job-a", TRANSPORT, retries)
    assert (report.job_id, answer.is_answer) == ("17", True)
    backend.says("queue", "102.pbs1|COMPLETED|job-a", "99.pbs1|COMPLETED|job-a")
    assert find_job(backend, "job-a", TRANSPORT, retries)[0].job_id == "102.pbs1", "in any order of the list"
    assert find_job(backend, "job-a", TRANSPORT, retries, known_ids={"102.pbs1"})[0].job_id == "99.pbs1"
    assert find_job(backend, "job-a", TRANSPORT, retries, known_ids={"102.pbs1", "99.pbs1"})[0] is None
    assert find_job(backend, "job-c", TRANSPORT, retries)[0] is None
    backend.fails("queue", "refused")
    report, answer = find_job(backend, "job-a", TRANSPORT, retries)
    assert (report, answer.is_answer) == (None, False)

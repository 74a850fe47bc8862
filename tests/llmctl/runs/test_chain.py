"""State of a run whose jobs submit each other: decided purely, and from the files and the queue."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from llmctl.backends import load_queue_backend
from llmctl.backends.base import JobReport
from llmctl.cli.main import main
from llmctl.context import Context
from llmctl.errors import UsageError
from llmctl.job_state import JobState
from llmctl.operate import queue_cancel
from llmctl.paths import UserFolders
from llmctl.runs.facts import AttemptFacts, Ending, Outcome, parse_ending, parse_started
from llmctl.runs.job_status import words_of
from llmctl.runs.links import Link, WaitingJob, newest_link_file, parse_link
from llmctl.runs.state import JobAnswer, RunFacts, decide
from llmctl.site.profile import load_profile
from llmctl.submit.dependencies import find_dependencies
from tests.llmctl.run_directories import TRANSPORT

NOW = 1_000_000.0
PASSES = AttemptFacts(
    2, ending=Ending(0, "timeout", "USR1", NOW - 3, passes_on=True), outcome=Outcome("stopped", 5, NOW)
)
SILENT = JobAnswer(JobState.UNKNOWN, "the scheduler does not answer: no route", source="queue", is_silent=True)
LEFT = JobAnswer(JobState.UNKNOWN, "the job has left the queue", source="queue", has_left=True)


def queue(state, raw, **changes):
    report = JobReport("123", JobState(state), raw, **changes)
    return JobAnswer(report.state, words_of(report), source="queue", report=report, has_left=report.state.is_finished)


def facts(job, **changes):
    run = RunFacts("demo-1", job, NOW - 100, None, PASSES, NOW, waiting=WaitingJob(3, "123"))
    return replace(run, **changes)


@pytest.mark.parametrize(
    ("job", "state", "detail"),
    [
        (queue("pending", "PD", reason="Priority"), "pending", "link 3 of the chain, job 123, pending: Priority"),
        (queue("running", "R"), "running", "starting (link 3 of the chain, job 123)"),
        (SILENT, "unknown", f"link 3 of the chain, job 123: {SILENT.raw}"),
        (None, "unknown", "link 3 of the chain, job 123: being submitted"),
        (LEFT, "unknown", f"link 3 of the chain, job 123, made no attempt: {LEFT.raw}"),
        (queue("completed", "CD"), "unknown", "link 3 of the chain, job 123, made no attempt: the scheduler reports"),
        (
            queue("node_fail", "NF"),
            "node_fail",
            "link 3 of the chain, job 123, ended before it made an attempt: a node failed (NF); llmctl resume demo-1",
        ),
    ],
)
def test_between_two_jobs(job, state, detail):
    verdict = decide(facts(job))
    assert verdict.state == state and verdict.detail.startswith(detail), verdict


def test_a_cancel_between_two_jobs():
    assert decide(facts(queue("pending", "PD"), cancel_requested=NOW - 5)).detail == "cancel requested 5 s ago"
    for job in (LEFT, queue("cancelled", "CA"), queue("completed", "CD")):
        verdict = decide(facts(job, cancel_requested=NOW - 5))
        assert (verdict.state, verdict.detail) == ("cancelled", "cancelled before link 3 of the chain, job 123, began")
    assert decide(facts(SILENT, cancel_requested=NOW - 5)).state is JobState.UNKNOWN


@pytest.mark.parametrize(
    ("job", "state", "detail"),
    [
        (queue("running", "R"), "running", "submitting the next job of the chain (reached its time limit, saved at it"),
        (SILENT, "unknown", "reached its time limit, saved at iteration 5; the scheduler does not answer"),
        (
            LEFT,
            "timeout",
            "reached its time limit, saved at iteration 5; the job ended before it could submit the next one; llmctl",
        ),
    ],
)
def test_while_the_next_job_is_submitted(job, state, detail):
    verdict = decide(facts(job, waiting=None))
    assert verdict.state == state and verdict.detail.startswith(detail), verdict


@pytest.mark.parametrize("reason", ["timeout", "failed"])
def test_the_end_of_a_chain_is_told_with_its_cause(reason):
    ending = Ending(1, reason, None, NOW - 3, not_chained="iteration 9 is saved, and job.chain.until is 9")
    verdict = decide(facts(queue("running", "R"), waiting=None, attempt=replace(PASSES, ending=ending)))
    assert verdict.state == ("timeout" if reason == "timeout" else "failed")
    assert verdict.detail.endswith("; the chain of jobs has ended: iteration 9 is saved, and job.chain.until is 9")


def test_the_files_of_a_chain():
    names = [".link-1-1", ".link-1-2", ".link-1-10", ".link-10-4", ".passed-1-11", ".link-1-x", "1", ".submission-1"]
    assert newest_link_file(names, 1) == ".link-1-10"
    assert (newest_link_file(names, 2), newest_link_file(names, None)) == ("", "")
    link = parse_link(b'{"link": 3, "time": 1, "said": "Submitted batch job 77\\n"}')
    slurm = load_queue_backend("slurm")
    assert slurm is not None and link is not None and (link.number, link.job_id(slurm)) == (3, "77")
    assert Link(3, "welcome").job_id(slurm) == ""
    assert parse_link(b'{"lin') is None and parse_link(None) is None
    ending = parse_ending(b'{"code": 0, "reason": "timeout", "passes_on": true}')
    assert ending is not None and ending.passes_on and not ending.is_final
    first, third = parse_started(b'{"job_id": "1"}'), parse_started(b'{"job_id": "1", "link": 3}')
    assert first is not None and third is not None and (first.link, third.link) == (1, 3)


def chained(cluster, *, answered=True):
    """A run whose job 17 has ended and, if answered, has submitted job 18."""
    made = cluster.run()
    made.record = replace(made.record, job={"nodes": 1, "chain": {"node_hours": 9}})
    made.record.save(TRANSPORT)
    attempt = made.start_attempt()
    end = {"code": 0, "reason": "timeout", "signal": "USR1", "time": time.time(), "passes_on": True}
    (attempt / "exit.json").write_text(json.dumps(end))
    (made.path / "attempts/.passed-1-1").touch()
    if answered:
        (made.path / "attempts/.link-1-1").write_text(json.dumps({"link": 2, "time": 1, "said": "18"}))
    return made


def status(capsys):
    capsys.readouterr()
    assert main(["status", "demo-1", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    return run["state"], run["detail"], run["job_ids"]


def test_status_is_about_the_newest_job(cluster, capsys):
    made = chained(cluster)
    cluster.backend.says("queue", "17|TIMEOUT|job-demo-1", "18|PENDING|job-demo-1|nodes are busy")
    told = ("pending", "link 2 of the chain, job 18, pending: nodes are busy", ["17", "18"])
    assert status(capsys) == told
    cluster.backend.says("queue", "17|TIMEOUT|job-demo-1", "18|RUNNING|job-demo-1")
    assert status(capsys)[:2] == ("running", "starting (link 2 of the chain, job 18)")
    made.start_attempt(2, job_id="18", link=2)
    assert status(capsys) == ("running", "", ["17", "18"])
    # The scheduler had taken the next job twice, and the other one came first.
    made.start_attempt(3, job_id="19", link=2)
    cluster.backend.says("queue", "18|COMPLETED|job-demo-1", "19|RUNNING|job-demo-1")
    assert status(capsys) == ("running", "", ["17", "19"])


def test_a_job_that_passes_the_run_on_while_the_queue_is_asked(cluster, capsys):
    """The files are older than the queue's answer, which has the end of the first job and no word on the next one."""
    made = chained(cluster, answered=False)
    answer = json.dumps({"link": 2, "time": 1, "said": "18"})
    act = f"""
        if [[ -e '{made.path}/attempts/.link-1-1' ]]; then
            echo "18|PENDING|job-demo-1|nodes are busy"
        else
            echo '{answer}' >'{made.path}/attempts/.link-1-1'
            echo "17|TIMEOUT|job-demo-1"
        fi"""
    cluster.backend.does("queue", act)
    assert status(capsys) == ("pending", "link 2 of the chain, job 18, pending: nodes are busy", ["17", "18"])


def test_a_run_with_a_waiting_job_cannot_be_resumed_or_waited_for(cluster, capsys):
    chained(cluster)
    cluster.backend.says("queue", "18|PENDING|job-demo-1|nodes are busy")
    assert main(["resume", "demo-1"]) == 5
    assert "demo-1 is still pending" in capsys.readouterr().err
    folders = UserFolders.from_environment(os.environ)
    context = Context((), (), dict(os.environ), Path.cwd(), folders)
    with pytest.raises(UsageError, match=r"--after demo-1: demo-1 goes on in further jobs .job.chain., which no job"):
        find_dependencies(context, "demo-1", load_profile(folders, "scripted"), asks_scheduler=True)


def test_a_cancel_ends_the_waiting_job(cluster, capsys):
    made = chained(cluster)
    cluster.backend.says("queue", "18|PENDING|job-demo-1|nodes are busy")
    cluster.backend.does("cancel", ': >"$1/queue"')
    assert main(["cancel", "demo-1"]) == 0
    assert capsys.readouterr().out == "demo-1: cancelled before link 2 of the chain, job 18, began\n"
    assert cluster.backend.calls("cancel") == ["cancel 18"]
    assert (made.path / "attempts/.cancelled-1").exists()
    assert status(capsys)[0] == "cancelled"


def test_a_cancel_also_ends_a_job_that_is_submitted_meanwhile(cluster, capsys, monkeypatch):
    monkeypatch.setattr(queue_cancel, "END_S", 0.5)
    made = chained(cluster, answered=False)
    cluster.backend.says("queue", "17|RUNNING|job-demo-1")
    answer = json.dumps({"link": 2, "time": 1, "said": "18"})
    # The command that ends the first job comes too late.
    act = f"""
        if [[ $3 == 17 ]]; then
            echo '{answer}' >'{made.path}/attempts/.link-1-1'
            echo "18|PENDING|job-demo-1" >"$1/queue"
        else
            : >"$1/queue"
        fi"""
    cluster.backend.does("cancel", act)
    assert main(["cancel", "demo-1"]) == 0
    assert cluster.backend.calls("cancel") == ["cancel 17", "cancel 18"]
    assert "cancelled before link 2" in capsys.readouterr().out

"""State of runs: pure decisions, and facts gathered about real processes."""

import json
import os
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from llmctl.backends.base import SubmittedJob
from llmctl.errors import SchedulerError
from llmctl.job_state import JobState
from llmctl.runs.facts import AttemptFacts, Ending, Heartbeat, Outcome, RankError, parse_error
from llmctl.runs.observe import observe_runs
from llmctl.runs.record import Submission
from llmctl.runs.state import JobAnswer, RunFacts, decide
from llmctl.transport.host_group import HostGroup
from llmctl.transport.local import LocalTransport
from llmctl.transport.processes import ProcessReport, identify
from tests.llmctl.run_directories import beat, fail, leave, make_run, outcome, recycled
from tests.waiting import HANG_S

pytestmark = pytest.mark.usefixtures("frozen_time")
NOW = 1_000_000.0
RUNNING = JobAnswer(JobState.RUNNING, "pid 7")
GONE = JobAnswer(JobState.FAILED, "job.sh (pid 7) was killed")
DOUBT = JobAnswer(JobState.UNKNOWN, "cannot be seen")


def facts(job=RUNNING, attempt=None, **changes):
    return replace(RunFacts("demo-1", job, NOW - 100, None, attempt, NOW), **changes)


def heartbeat(rank, age_s, iteration=7, phase="forward"):
    return Heartbeat(rank, "n1", iteration, phase, NOW - age_s)


def ended(reason, code=0, **changes):
    return AttemptFacts(1, ending=Ending(code, reason, None, NOW - 3), **changes)


@pytest.mark.parametrize(
    ("attempt", "state", "detail"),
    [
        (ended("completed", outcome=Outcome("completed", 100, NOW)), "completed", "completed at iteration 100"),
        (
            ended("stopped", outcome=Outcome("stopped", 42, NOW)),
            "cancelled",
            "stopped at iteration 42, saved; llmctl resume demo-1 continues",
        ),
        (ended("stopped"), "cancelled", "stopped; llmctl resume demo-1 continues"),
        (ended("cancelled", 143), "cancelled", "cancelled"),
        (ended("failed", 137), "failed", "ended by signal 9 (exit code 137)"),
        (
            AttemptFacts(1, ending=Ending(143, "failed", "TERM", NOW)),
            "failed",
            "did not end in time after SIGTERM and was killed (exit code 143)",
        ),
        (ended("failed", 1), "failed", "ended with exit code 1"),
        (
            ended("failed", 1, heartbeats=(heartbeat(0, 5),)),
            "failed",
            "ended with exit code 1; no rank wrote an error report",
        ),
        (
            AttemptFacts(1, ending=Ending(1, "failed", None, NOW, "no node started its part")),
            "failed",
            "no node started its part",
        ),
        (ended("tired", 1), "unknown", "exit.json says 'tired'"),
    ],
)
@pytest.mark.parametrize("job", [RUNNING, GONE, DOUBT, None])
def test_exit_json_decides_the_state(attempt, state, detail, job):
    verdict = decide(facts(job, attempt))
    assert (verdict.state, verdict.detail) == (state, detail)
    assert verdict.exit_code == attempt.ending.code


def test_a_cancelled_run_is_cancelled_even_if_job_sh_did_not_know():
    for reason, code in (("failed", 143), ("stopped", 0)):
        assert decide(facts(GONE, ended(reason, code), cancel_requested=NOW - 5)).state is JobState.CANCELLED
    assert decide(facts(GONE, ended("completed"), cancel_requested=NOW - 5)).state is JobState.COMPLETED


def test_the_first_rank_to_fail_is_the_cause():
    late = RankError(0, "pp 0, dp 0, tp 0", "n1", 7, "RuntimeError", "[gloo] Connection closed by peer", NOW - 9)
    early = RankError(3, "pp 1, dp 0, tp 1", "n2", 7, "ValueError", "loss is NaN\nat layer 3", NOW - 8)
    verdict = decide(facts(GONE, ended("failed", 1, errors=(late, early))))
    assert verdict.detail == "rank 3 (pp 1, dp 0, tp 1) on n2: ValueError: loss is NaN"
    # Who lost a peer does not know why; the supervisor may know.
    ending = Ending(137, "failed", None, NOW, "torchrun on n4 was ended by signal 9")
    known = decide(facts(GONE, AttemptFacts(1, ending=ending, errors=(late,))))
    assert known.detail.startswith("torchrun on n4 was ended by signal 9; rank 0 "), known
    assert decide(facts(GONE, AttemptFacts(1, ending=ending, errors=(late, early)))).detail == verdict.detail


def test_a_rank_without_an_error_report_is_named_if_the_others_only_lost_it():
    error = RankError(0, "", "n1", 7, "RuntimeError", "[/a/pair.cc:55] Connection closed by peer", NOW - 8)
    attempt = ended("failed", 1, errors=(error,), heartbeats=(heartbeat(0, 9), heartbeat(1, 12, phase="save")))
    detail = decide(facts(GONE, attempt)).detail
    assert detail == (
        "rank 1 on n1 (phase save, iteration 7) ended without an error report (killed, or out of memory?); "
        "rank 0 on n1: RuntimeError: Connection closed by peer"
    )


def test_the_only_rank_is_named_by_its_heartbeat_if_the_output_tells_only_its_signal():
    line = "failed (exitcode: -9) local_rank: 0 (pid: 8348) of binary: /bin/python"
    ending = Ending(137, "failed", None, NOW, "", output_kind="killed", output_line=line)
    beats = (heartbeat(0, 9, phase="save"), heartbeat(1, 9))
    alone = decide(facts(GONE, AttemptFacts(1, ending=ending, heartbeats=beats[:1]))).detail
    assert alone == "rank 0 on n1 (phase save, iteration 7) ended without an error report (killed, or out of memory?)"
    many = decide(facts(GONE, AttemptFacts(1, ending=ending, heartbeats=beats))).detail
    assert many.startswith(f"killed by a signal: {line}; ")


def test_a_rank_whose_own_socket_cannot_be_opened_is_the_cause():
    lost = RankError(1, "", "n1", 0, "DistNetworkError", "Connection reset by peer", NOW - 9)
    bound = RankError(0, "", "n1", 0, "DistNetworkError", "The server socket has failed to listen: EADDRINUSE", NOW - 8)
    detail = decide(facts(GONE, ended("failed", 1, errors=(lost, bound)))).detail
    assert detail == "rank 0 on n1: DistNetworkError: The server socket has failed to listen: EADDRINUSE"


def test_an_error_marked_as_a_consequence_is_not_the_cause():
    values = {
        "rank": 0,
        "host": "n1",
        "type": "RuntimeError",
        "message": "waited too long for its peers",
        "time": NOW - 9,
    }
    waited = parse_error(json.dumps(values | {"consequence": True}).encode())
    cause = parse_error(json.dumps(values | {"rank": 1, "message": "torn", "time": NOW - 8}).encode())
    assert waited is not None
    assert cause is not None
    detail = decide(facts(GONE, ended("failed", 1, errors=(waited, cause)))).detail
    assert detail == "rank 1 on n1: RuntimeError: torn"
    beats = (heartbeat(0, 9), heartbeat(1, 12, phase="save"))
    alone = decide(facts(GONE, ended("failed", 1, errors=(waited,), heartbeats=beats))).detail
    assert alone.startswith("rank 1 on n1 (phase save, iteration 7) ended without an error report")


def test_without_exit_file_the_job_decides():
    attempt = AttemptFacts(1, heartbeats=(heartbeat(0, 12), heartbeat(1, 14)))
    assert decide(facts(RUNNING, attempt)).state is JobState.RUNNING
    killed = decide(facts(GONE, attempt))
    assert (killed.state, killed.ended) == (JobState.FAILED, NOW - 12)
    assert killed.detail == "job.sh (pid 7) was killed before exit.json could be written; last heartbeat 12 s ago"
    restarted = decide(facts(JobAnswer(JobState.NODE_FAIL, "the machine was restarted"), attempt))
    assert restarted.state is JobState.NODE_FAIL
    assert restarted.detail.startswith("the machine was restarted before")
    assert decide(facts(GONE, replace(attempt, cancel_marked=True))).state is JobState.CANCELLED
    assert decide(facts(GONE, attempt, cancel_requested=NOW - 5)).state is JobState.CANCELLED
    assert decide(facts(GONE, None)).detail.endswith("see llmctl logs demo-1 --job")


def test_outcome_json_counts_if_job_sh_was_killed():
    done = AttemptFacts(1, outcome=Outcome("completed", 100, NOW - 2))
    assert decide(facts(GONE, done)).state is JobState.COMPLETED
    stopped = decide(facts(GONE, AttemptFacts(1, outcome=Outcome("stopped", 50, NOW - 2))))
    assert stopped.state is JobState.CANCELLED
    assert "llmctl resume demo-1" in stopped.detail


def test_a_run_with_surviving_processes_is_running():
    verdict = decide(facts(replace(GONE, survivors=3), AttemptFacts(1)))
    assert verdict.state is JobState.RUNNING
    assert "3 of its processes still run; llmctl cancel demo-1 ends them" in verdict.detail


def test_doubt_never_ends_a_run():
    assert decide(facts(DOUBT, None)).state is JobState.UNKNOWN
    fresh = decide(facts(DOUBT, AttemptFacts(1, heartbeats=(heartbeat(0, 3),))))
    assert (fresh.state, fresh.detail) == (JobState.RUNNING, "heartbeat 3 s ago; cannot be seen")
    old = decide(facts(DOUBT, AttemptFacts(1, heartbeats=(heartbeat(0, 3000),))))
    assert (old.state, old.detail) == (JobState.UNKNOWN, "cannot be seen; last heartbeat 50 min ago")
    assert decide(facts(None, None)).state is JobState.UNKNOWN
    assert decide(facts(None, None, submitted=NOW - 2)).state is JobState.PENDING


# The tests below use real processes and real files.

TRANSPORT = LocalTransport(os.environ)


@contextmanager
def sleeping(**env):
    process = subprocess.Popen(["sleep", "1000"], env={**os.environ, **env}, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(HANG_S)


def view(run):
    return observe_runs([run.record], TRANSPORT)[0]


def test_a_run_from_submission_to_end(tmp_path):
    run = make_run(tmp_path)
    assert view(run).state is JobState.PENDING
    with sleeping() as job:
        run.submit(identify(job.pid))
        assert (view(run).state, view(run).detail) == (JobState.RUNNING, "starting")
        attempt = run.start_attempt()
        beat(attempt, 0, age_s=1)
        run.metrics(1, 2, 3)
        running = view(run)
        assert (running.state, running.detail, running.iteration, running.train_iters) == ("running", "", 3, 100)
        assert (running.loss, running.tokens_per_s, running.mfu) == (9.7, 5000.0, 0.25)
        assert running.eta_s == pytest.approx(97 * 0.5)
        assert running.metrics_age_s == pytest.approx(1.0)
        outcome(attempt, "completed", 100)
        leave(attempt, "completed")
    done = view(run)
    assert (done.state, done.exit_code, done.eta_s) == ("completed", 0, None)
    assert done.ended >= done.started


def test_a_killed_job_and_a_recycled_pid_are_not_running(tmp_path):
    run = make_run(tmp_path)
    with sleeping() as other:
        run.submit(recycled(identify(other.pid)))
        beat(run.start_attempt(), 0, age_s=12)
        seen = view(run)
    assert seen.state is JobState.FAILED
    assert "last heartbeat 12 s ago" in seen.detail
    assert "SIGKILL" in seen.detail


def test_a_restarted_machine_is_a_failed_node(tmp_path):
    run = make_run(tmp_path)
    with sleeping() as other:
        run.submit(replace(identify(other.pid), boot_id="the start before"))
        run.start_attempt()
        assert view(run).state is JobState.NODE_FAIL
        assert view(run).detail.startswith("the machine was restarted")


def test_a_run_of_another_machine_is_unknown_here(tmp_path):
    run = make_run(tmp_path)
    with sleeping() as other:
        run.submit(replace(identify(other.pid), boot_id="of the other machine"))
    attempt = run.start_attempt(host="elsewhere")
    seen = view(run)
    assert seen.state is JobState.UNKNOWN
    assert "started on elsewhere" in seen.detail
    beat(attempt, 0, age_s=1)
    assert view(run).state is JobState.RUNNING


def test_an_identity_without_a_start_time_is_in_doubt(tmp_path):
    run = make_run(tmp_path)
    with sleeping() as other:
        run.submit(replace(identify(other.pid), start_time=None))
        run.start_attempt()
        assert view(run).state is JobState.UNKNOWN
    assert view(run).state is JobState.FAILED, "there is no such pid any more: no doubt"


def test_a_submit_interrupted_before_the_job_was_recorded_is_found_by_started_json(tmp_path):
    run = make_run(tmp_path).submit(None, age_s=3600)
    assert view(run).state is JobState.UNKNOWN
    with sleeping() as job:
        it = identify(job.pid)
        run.start_attempt(pid=it.pid, pid_start_time=it.start_time, boot_id=it.boot_id)
        assert view(run).state is JobState.RUNNING
    assert view(run).state is JobState.FAILED


def test_survivors_of_a_killed_job_are_counted(tmp_path):
    run = make_run(tmp_path)
    with sleeping() as job, sleeping(LLMCTL_RUN_DIR=str(run.path)):
        run.submit(identify(job.pid))
        run.start_attempt()
        job.kill()
        job.wait(HANG_S)
        seen = view(run)
        assert seen.state is JobState.RUNNING
        assert "but 1 of its processes still run" in seen.detail
    assert view(run).state is JobState.FAILED


def test_an_earlier_submissions_end_says_nothing_about_the_last(tmp_path):
    run = make_run(tmp_path)
    with sleeping() as first, sleeping() as second:
        run.submit(identify(first.pid))
        attempt = run.start_attempt(1)
        fail(attempt, 1, "boom", age_s=9)
        leave(attempt, "failed", 1)
        assert view(run).detail == "rank 1 (pp 0, dp 1, tp 0) on n1: RuntimeError: boom"
        run.submit(identify(second.pid))
        assert (view(run).state, view(run).detail, view(run).attempt) == (JobState.RUNNING, "starting", None)
        run.start_attempt(2)
        assert (view(run).state, view(run).attempt) == (JobState.RUNNING, 2)


def test_incomplete_and_unrelated_files_are_ignored(tmp_path):
    run = make_run(tmp_path)
    with sleeping() as job:
        run.submit(identify(job.pid))
        attempt = run.start_attempt()
        for name in ("exit.json", "outcome.json", "heartbeat/rank-00000.json", "errors/rank-00000.json"):
            (attempt / name).write_bytes(b'{"code": 0, "rea\xff')
        (attempt / "heartbeat" / ".rank-00001.json.123").write_text("{}")
        (run.path / "attempts" / "lost+found").mkdir()
        run.metrics(1, lm_loss="NaN", tokens_per_s=None, time=None)
        seen = view(run)
    assert seen.state is JobState.RUNNING
    assert (seen.iteration, seen.loss, seen.metrics_age_s) == (1, None, None)
    run.metrics(2, lm_loss=float("nan"))
    assert view(run).as_json()["loss"] is None


def test_many_runs_are_observed_in_a_fixed_number_of_round_trips(tmp_path):
    class Counting(LocalTransport):
        def __init__(self):
            super().__init__({})
            object.__setattr__(self, "trips", [])

        def read_parts(self, reads):
            self.trips.append("read")
            return TRANSPORT.read_parts(reads)

        def list_names(self, directories):
            self.trips.append("list")
            return TRANSPORT.list_names(directories)

    runs = []
    with sleeping() as job:
        for number in range(20):
            run = make_run(tmp_path, f"demo-{number:04d}").submit(identify(job.pid))
            beat(run.start_attempt(), 0, age_s=1)
            runs.append(run.record)
        transport = Counting()
        assert {seen.state for seen in observe_runs(runs, transport)} == {JobState.RUNNING}
        assert len(transport.trips) <= 6


def test_job_sh_of_each_host_is_checked_on_that_host(tmp_path):
    class Host(LocalTransport):
        def __init__(self, name, alive):
            super().__init__({})
            object.__setattr__(self, "answer", (name, alive))

        def inspect_processes(self, identities):
            name, alive = self.answer
            if alive == "away":
                raise SchedulerError(f"{name}: no route to host", transient=True)
            return ProcessReport(name, f"boot-{name}", (alive,) * len(identities))

    def state_of(**alive):
        group = HostGroup({name: Host(name, answer) for name, answer in alive.items()})
        (seen,) = observe_runs([run.record], group)
        return seen.state.value

    run = make_run(tmp_path)
    jobs = tuple(SubmittedJob(host, f"{number}", number, 5, f"boot-{host}") for number, host in enumerate(("h1", "h2")))
    run.record = run.record.with_submission(Submission(1, time.time() - 100, jobs))
    assert state_of(h1=True, h2=True) == "running"
    assert state_of(h1=False, h2=True) == "running"
    assert state_of(h1=True, h2="away") == "running"
    assert state_of(h1=False, h2=False) == "failed"
    assert state_of(h1=False, h2="away") == "unknown"

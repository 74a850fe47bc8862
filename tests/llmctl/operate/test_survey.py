"""``llmctl status`` on clusters with a scheduler: numbers of queries, and unreachable clusters."""

import json
import sys
import time
from dataclasses import replace
from functools import partial

import pytest

from llmctl.cli.main import main
from llmctl.errors import SchedulerError
from llmctl.job_state import JobState
from llmctl.operate.survey import RunSurvey
from llmctl.runs.job_status import SchedulerWatch
from llmctl.runs.observe import observe_runs
from llmctl.transport.local import LocalTransport
from tests.llmctl.run_directories import TRANSPORT, beat, leave, make_run, outcome
from tests.llmctl.scripted_cluster import ScriptedCluster


def documents(capsys, *arguments, code=0):
    assert main(["status", "--json", *arguments]) == code
    return {run["run_id"]: run for run in json.loads(capsys.readouterr().out)["runs"]}


def state_of(capsys, *arguments):
    (run,) = documents(capsys, *arguments).values()
    return run["state"], run["detail"]


def calls_made(act):
    """Number of functions that ``act`` calls: its work, however busy the machine is."""
    calls = [0]

    def count(_frame, event, _argument):
        calls[0] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls[0]


def test_status_from_submission_to_end(cluster, capsys):
    made = cluster.run()
    cluster.backend.says("queue", "17|PENDING|job-demo-1|nodes are busy|2026-11-21T14:00:00")
    run = documents(capsys)["demo-1"]
    assert (run["state"], run["expected_start"]) == ("pending", "2026-11-21T14:00:00")
    assert run["detail"] == "nodes are busy; expected to start 2026-11-21T14:00:00"
    assert (run["job_ids"], run["attempts"], run["submission"], run["hosts"]) == (["17"], 0, 1, [])
    assert time.time() - run["submitted"] == pytest.approx(3600)
    cluster.backend.says("queue", "17|RUNNING|job-demo-1|||n1,n2")
    attempt = made.start_attempt(host="n1")
    beat(attempt, 0, age_s=1)
    run = documents(capsys)["demo-1"]
    assert (run["state"], run["detail"], run["attempts"], run["hosts"]) == ("running", "", 1, ["n1", "n2"])
    (attempt / "hostfile").write_text("n2 slots=4\nn1 slots=4\n")
    outcome(attempt, "completed", 100)
    leave(attempt, "completed")
    asked = len(cluster.backend.calls())
    run = documents(capsys)["demo-1"]
    assert (run["state"], run["hosts"]) == ("completed", ["n2", "n1"])
    assert len(cluster.backend.calls()) == asked, "no query for a run that has ended"


def test_a_thousand_runs_need_one_scheduler_call_and_few_round_trips(cluster):
    class Counting(LocalTransport):
        trips = []

        def read_parts(self, reads):
            self.trips.append(len(reads))
            return LocalTransport.read_parts(reads)

        def list_names(self, directories):
            self.trips.append(len(directories))
            return LocalTransport.list_names(directories)

    records = []
    for number in range(1000):
        made = cluster.run(f"demo-{number:04d}", str(number))
        if number % 2:
            beat(made.start_attempt(), 0, age_s=1)
        records.append(made.record)
    states = ("PENDING", "RUNNING")
    cluster.backend.says("queue", *(f"{number}|{states[number % 2]}" for number in range(1000)))
    transport = Counting({"PATH": "/usr/bin:/bin"})
    watch = SchedulerWatch(cluster.backend, transport)
    views = observe_runs(records, transport, watch)
    assert [view.state for view in views] == [JobState.PENDING, JobState.RUNNING] * 500
    assert len(cluster.backend.calls()) == 1
    assert len(transport.trips) <= 5
    few, many = (calls_made(partial(observe_runs, records[:count], transport, watch)) for count in (20, 200))
    assert many < 11 * few, "work grows faster than the number of runs"


def test_one_accounting_call_only_for_jobs_that_have_left_the_queue(cluster, capsys):
    for number in range(5):
        made = cluster.run(f"demo-{number}", str(number))
        if number == 3:
            leave(made.start_attempt(), "completed")
    cluster.backend.says("queue", "0|RUNNING")
    cluster.backend.says("accounting", "1|TIMEOUT", "2|NODE_FAIL")
    states = {run_id: run["state"] for run_id, run in documents(capsys).items()}
    assert states == {
        "demo-0": "running",
        "demo-1": "timeout",
        "demo-2": "node_fail",
        "demo-3": "completed",
        "demo-4": "unknown",
    }
    assert [sorted(call.split()) for call in cluster.backend.calls("accounting")] == [["1", "2", "4", "accounting"]]
    assert len(cluster.backend.calls("queue")) == 1


def test_exit_json_written_during_the_queue_query_overrides_the_accounting(cluster, capsys):
    attempt = cluster.run().start_attempt()
    written = '{"code": 0, "reason": "completed", "signal": null, "time": 5}'
    cluster.backend.does("queue", f"echo '{written}' >{attempt}/exit.json")
    cluster.backend.says("accounting", "17|FAILED")
    assert state_of(capsys)[0] == "completed"
    assert cluster.backend.calls("accounting") == []


def test_a_late_failing_or_missing_accounting_ends_no_run(cluster, capsys, monkeypatch):
    made = cluster.run(age_s=120)
    cluster.backend.says("queue")
    cluster.backend.says("accounting")
    assert state_of(capsys) == ("unknown", "the job has left the queue; the accounting has no entry yet")
    cluster.backend.says("accounting", "17|RUNNING")
    assert state_of(capsys) == ("unknown", "the job has left the queue; the accounting still reports it as RUNNING")
    cluster.backend.fails("accounting", "its database is away")
    assert state_of(capsys) == (
        "unknown",
        "the job has left the queue, and the accounting does not answer: its database is away",
    )
    monkeypatch.setattr(type(cluster.backend), "accounting_argv", lambda *_: None)
    assert "this scheduler has no accounting" in state_of(capsys)[1]
    beat(made.start_attempt(), 0, age_s=2)
    assert state_of(capsys)[0] == "running"


def test_jobs_purged_long_ago_are_unknown_with_their_last_heartbeat(cluster, capsys):
    made = cluster.run(age_s=86400)
    attempt = made.start_attempt(time=time.time() - 86000)
    beat(attempt, 0, age_s=80000)
    cluster.backend.says("queue")
    cluster.backend.says("accounting")
    state, detail = state_of(capsys)
    assert state == "unknown"
    assert detail == "the job has left the queue, and the accounting has no entry; last heartbeat 22 h 13 min ago"


def test_a_queue_that_does_not_answer_changes_no_state(cluster, capsys):
    cluster.run()
    beat(cluster.run("demo-2", "18").start_attempt(), 0, age_s=2)
    cluster.backend.fails("queue", "no route to it")
    found = documents(capsys)
    assert found["demo-1"]["state"] == "unknown"
    assert found["demo-1"]["detail"] == "the scheduler does not answer: no route to it"
    assert found["demo-2"]["state"] == "running"
    assert cluster.backend.calls("accounting") == []


def test_a_reused_job_id_is_another_job(cluster, capsys):
    cluster.run(age_s=120)
    cluster.backend.says("queue", "17|RUNNING|somebody-elses")
    cluster.backend.says("accounting", "17|COMPLETED|somebody-elses-too")
    assert state_of(capsys) == ("unknown", "the job has left the queue; the accounting has no entry yet")


def test_a_job_whose_submit_answer_was_lost_is_found_by_name(cluster, capsys):
    cluster.run(job_id=None)
    cluster.backend.says("queue", "16|RUNNING|job-demo-10", "17|PENDING|job-demo-1|nodes are busy")
    run = documents(capsys)["demo-1"]
    assert (run["state"], run["detail"], run["job_ids"]) == ("pending", "nodes are busy", ["17"])
    cluster.backend.says("queue")
    state, detail = state_of(capsys)
    assert (state, detail.rpartition("; ")[2]) == ("unknown", "the queue has no job named job-demo-1")


def test_the_end_of_an_earlier_job_says_nothing_about_a_lost_submit(cluster, capsys):
    cluster.run(job_id="17").submit_to_queue(None)
    cluster.backend.says("queue", "17|COMPLETED|job-demo-1")
    state, detail = state_of(capsys, "demo-1")[:2]
    assert state == "unknown" and "no job named job-demo-1" in detail


def test_an_interrupted_submit_is_known_from_started_json(cluster, capsys):
    made = cluster.run(job_id=None)
    made.start_attempt(job_id="17")
    cluster.backend.says("queue", "17|RUNNING|job-demo-1")
    assert state_of(capsys)[0] == "running"
    assert cluster.backend.calls() == ["queue 17"]


def test_a_requeued_run_is_pending_again(cluster, capsys):
    made = cluster.run()
    leave(made.start_attempt(), "stopped", signal="TERM")
    cluster.backend.says("queue", "17|PENDING|job-demo-1|its start time has not come||||1")
    assert state_of(capsys) == (
        "pending",
        "its start time has not come; the scheduler has stopped it (stopped)",
    )
    cluster.backend.says("queue", "17|RUNNING|job-demo-1|||||1")
    assert state_of(capsys) == ("running", "starting again")
    beat(made.start_attempt(2), 0, age_s=1)
    run = documents(capsys)["demo-1"]
    assert (run["state"], run["detail"], run["attempt"], run["attempts"]) == ("running", "", 2, 2)


def test_an_ended_run_is_queried_again_only_by_name(cluster, capsys):
    cluster.run()
    cluster.backend.says("queue", "17|NODE_FAIL")
    assert state_of(capsys)[0] == "node_fail"
    asked = len(cluster.backend.calls())
    state, detail = state_of(capsys)
    assert (state, detail) == ("node_fail", "node_fail when last seen 0 s ago")
    assert len(cluster.backend.calls()) == asked
    assert state_of(capsys, "demo-1")[1].startswith("a node failed (NODE_FAIL)")
    assert len(cluster.backend.calls()) == asked + 1
    cluster.backend.fails("queue", "no route to it")
    state, detail = state_of(capsys, "demo-1")
    assert (state, "(the scheduler does not answer: no route to it)" in detail) == ("node_fail", True)
    cluster.backend.says("queue")
    cluster.backend.says("accounting")
    assert state_of(capsys, "demo-1")[0] == "node_fail", "a state that was seen once is kept after the job is purged"


def test_secrets_of_a_run_that_is_seen_to_have_ended_are_removed(cluster, capsys):
    made = cluster.run()
    made.record = replace(made.record, job={"nodes": 1, "secrets": ["TOKEN"]})
    made.record.save(TRANSPORT)
    secrets = made.path / "own" / "secrets" / "demo-1.1"
    secrets.parent.mkdir(parents=True)
    secrets.write_text("TOKEN\0hidden\0")
    cluster.backend.says("queue", "17|RUNNING")
    assert state_of(capsys)[0] == "running"
    assert secrets.exists()
    cluster.backend.says("queue", "17|NODE_FAIL")
    assert state_of(capsys)[0] == "node_fail"
    assert not secrets.exists()


def test_a_job_that_ended_before_its_attempt_shows_the_last_line_of_job_log(cluster, capsys):
    made = cluster.run()
    (made.path / "job.log").write_bytes(b"x" * 9000 + b"\nbash: /venv/bin/activate:  No such file\n\n")
    cluster.backend.says("queue", "17|FAILED")
    last = "last line of job.log: bash: /venv/bin/activate: No such file;"
    assert f"before it made an attempt; {last}" in state_of(capsys)[1]


def test_output_of_an_earlier_job_is_not_shown_for_a_resumed_one(cluster, capsys):
    made = cluster.run()
    (made.path / "job.log").write_text("words of the first\n")
    made.submit_to_queue("18")
    cluster.backend.says("queue", "18|FAILED")
    state, detail = state_of(capsys)
    assert (state, "words of the first" in detail) == ("failed", False)


def test_a_resumed_run_is_queried_again(cluster, capsys):
    made = cluster.run()
    cluster.backend.says("queue", "17|NODE_FAIL")
    assert state_of(capsys)[0] == "node_fail"
    made.submit_to_queue("18", age_s=-1)  # resumed on another machine with a separate index
    cluster.backend.says("queue", "18|PENDING||nodes are busy")
    assert state_of(capsys) == ("pending", "nodes are busy")


def test_an_unreachable_cluster_hides_no_other(cluster, tmp_path, capsys, monkeypatch):
    away = ScriptedCluster(tmp_path, "away")
    away.run("far-1", "99")
    away.index.update_state("far-1", "running", time.time() - 300)
    cluster.run()
    cluster.backend.says("queue", "17|RUNNING")
    near = LocalTransport({"PATH": "/usr/bin:/bin"})

    class Unreachable(LocalTransport):
        def read_parts(self, _):
            raise SchedulerError("login.away: no route to host\nis the VPN up?", transient=True)

    def connect(_, profile):
        return Unreachable({}) if profile.name == "away" else near

    monkeypatch.setattr("llmctl.context.Context.connect", connect)
    found = documents(capsys)
    assert (found["demo-1"]["state"], found["far-1"]["state"]) == ("running", "running")
    detail = found["far-1"]["detail"]
    assert detail.startswith("as seen 5 min ago; away cannot be reached: login.away: no route to host")
    assert "\n" not in detail
    assert away.index.find("far-1").last_state == "running"
    far = documents(capsys, "far-1", code=4)
    assert far["far-1"]["state"] == "running"


def test_watching_retries_an_unreachable_cluster_only_after_a_pause(cluster, monkeypatch, capsys):
    made = cluster.run()
    cluster.backend.says("queue", "17|RUNNING")
    tries, now = [], [1000.0]

    class Flaky(LocalTransport):
        def read_parts(self, reads):
            tries.append(now[0])
            if now[0] < 1070:
                raise SchedulerError("login: no route to host", transient=True)
            leave(made.path / "attempts/1", "completed")
            return LocalTransport.read_parts(reads)

    def pass_time(_):
        now[0] += 10

    made.start_attempt()
    transport = Flaky({"PATH": "/usr/bin:/bin"})
    monkeypatch.setattr("llmctl.context.Context.connect", lambda *_: transport)
    monkeypatch.setattr("llmctl.operate.survey.time.monotonic", lambda: now[0])
    monkeypatch.setattr("llmctl.cli.status.time.sleep", pass_time)
    assert main(["status", "--watch"]) == 0
    assert sorted(set(tries)) == [1000, 1060, 1120]
    assert "completed" in capsys.readouterr().out


def test_a_cluster_with_a_missing_profile_hides_no_other(cluster, tmp_path, capsys):
    made = make_run(tmp_path / "runs", "gone-1", cluster="gone").submit_to_queue("5")
    cluster.index.add(made.record)
    cluster.run()
    cluster.backend.says("queue", "17|RUNNING")
    found = documents(capsys)
    assert (found["demo-1"]["state"], found["gone-1"]["state"]) == ("running", "unknown")
    assert found["gone-1"]["detail"] == (
        f"no cluster is called 'gone' any more; put its profile back to {tmp_path}/config/llmctl/clusters/gone.yaml"
    )


@pytest.mark.parametrize("text", [None, "scheduler: [\n"], ids=["gone", "broken"])
def test_an_ended_run_keeps_its_state_without_a_profile(cluster, tmp_path, text, capsys):
    profile = tmp_path / "config/llmctl/clusters/gone.yaml"
    if text is not None:
        profile.write_text(text)
    for run_id, state in (("gone-1", "completed"), ("gone-2", "running")):
        cluster.index.add(make_run(tmp_path / "runs", run_id, cluster="gone").submit_to_queue("5").record)
        cluster.index.update_state(run_id, state, time.time())
    found = documents(capsys)
    assert (found["gone-1"]["state"], found["gone-1"]["detail"]) == ("completed", "")
    assert found["gone-2"]["state"] == "unknown"
    assert str(profile) in found["gone-2"]["detail"] and "last seen running" in found["gone-2"]["detail"]
    assert main(["status"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3, "a row is one line"


def test_watching_queries_the_scheduler_every_half_minute(cluster, monkeypatch, capsys):
    made = cluster.run()
    cluster.backend.says("queue", "17|PENDING|job-demo-1|nodes are busy")
    looks = []
    look = RunSurvey.look

    def look_later(self, *arguments, **options):
        looks.append(None)
        if len(looks) == 4:
            made.start_attempt()
        if len(looks) == 7:
            leave(made.path / "attempts/1", "completed")
        return look(self, *arguments, **options)

    monkeypatch.setattr(RunSurvey, "look", look_later)
    monkeypatch.setattr("llmctl.cli.status.WATCH_INTERVAL_S", 0.01)
    assert main(["status", "--watch"]) == 0
    out = capsys.readouterr().out
    assert len(cluster.backend.calls()) == 1
    assert [line.split()[2] for line in out.splitlines() if line.startswith("demo-1")] == [
        *["pending"] * 3,
        *["running"] * 3,
        "completed",
    ]

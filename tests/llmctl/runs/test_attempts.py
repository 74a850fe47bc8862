"""Numbers of reads for repeated observation of a run; no change is missed."""

import json
import time

import pytest

from llmctl.cli.main import main
from llmctl.job_state import JobState
from llmctl.operate.survey import RunSurvey
from llmctl.runs import attempts
from llmctl.runs.attempts import DetailsMemory
from llmctl.runs.job_status import SchedulerWatch
from llmctl.runs.observe import observe_run
from llmctl.transport.local import LocalTransport
from tests.llmctl.run_directories import beat, fail, leave

RANKS = 40


class Counting(LocalTransport):
    """Transport that counts the files read and the folders listed."""

    def __init__(self):
        super().__init__({"PATH": "/usr/bin:/bin"})
        self.acts = []
        self.read = []
        self.listed = []

    def read_parts(self, reads):
        self.acts += [read.path for read in reads]
        self.read += [read.path for read in reads]
        return LocalTransport.read_parts(reads)

    def list_names(self, directories):
        self.acts += directories
        self.listed += directories
        return LocalTransport.list_names(directories)

    def count(self, folder):
        return sum(f"/{folder}/" in path for path in self.read)


@pytest.fixture
def running(cluster):
    made = cluster.run()
    attempt = made.start_attempt()
    for rank in range(RANKS):
        beat(attempt, rank, age_s=1)
    cluster.backend.says("queue", "17|RUNNING|job-demo-1")
    return cluster, made, attempt


@pytest.fixture
def clock(monkeypatch):
    now = [time.monotonic()]
    monkeypatch.setattr(attempts.time, "monotonic", lambda: now[0])
    return now


def test_heartbeats_are_read_at_intervals_and_errors_once(running, clock):
    cluster, made, attempt = running
    transport, memory = Counting(), DetailsMemory()

    def look():
        clock[0] += 1
        return observe_run(made.record, transport, SchedulerWatch(cluster.backend, transport), memory)

    assert [look().state for _ in range(10)] == [JobState.RUNNING] * 10
    assert transport.count("heartbeat") == RANKS
    assert sum(path.endswith("/heartbeat") for path in transport.listed) == 1
    fail(attempt, 3, "boom", age_s=0)
    assert "boom" in look().detail
    assert "boom" in look().detail
    assert transport.count("errors") == 1
    clock[0] += 20
    look()
    assert transport.count("heartbeat") == 2 * RANKS
    leave(attempt, "failed", code=1)
    assert look().state is JobState.FAILED
    assert transport.count("heartbeat") == 3 * RANKS


def test_cached_heartbeats_do_not_look_older(running, clock):
    cluster, made, attempt = running
    transport, memory = Counting(), DetailsMemory()
    for rank in range(RANKS):
        beat(attempt, rank, age_s=20)
    clock[0] -= 14
    assert observe_run(made.record, transport, SchedulerWatch(cluster.backend, transport), memory).detail == ""
    clock[0] += 14
    for path in (attempt / "heartbeat").iterdir():
        path.write_text(json.dumps({**json.loads(path.read_text()), "time": time.time() - 40}))
    again = observe_run(made.record, transport, SchedulerWatch(cluster.backend, transport), memory)
    assert (again.state, again.detail) == (JobState.RUNNING, "")
    clock[0] += 2
    again = observe_run(made.record, transport, SchedulerWatch(cluster.backend, transport), memory)
    assert "no heartbeat for 40 s" in again.detail


def test_a_first_heartbeat_is_seen_at_once(running):
    cluster, made, attempt = running
    transport, memory = Counting(), DetailsMemory()
    beats = [path.rename(attempt / path.name) for path in (attempt / "heartbeat").iterdir()]
    observe_run(made.record, transport, SchedulerWatch(cluster.backend, transport), memory)
    assert transport.count("heartbeat") == 0
    beats[0].rename(attempt / "heartbeat" / beats[0].name)
    observe_run(made.record, transport, SchedulerWatch(cluster.backend, transport), memory)
    assert transport.count("heartbeat") == 1


def test_the_folder_is_listed_before_exit_json_of_an_ended_job_is_read_again(running):
    """NFS caches a missing file for up to a minute, unless its folder is opened."""
    cluster, made, attempt = running
    cluster.backend.says("queue")
    transport = Counting()
    observe_run(made.record, transport, SchedulerWatch(cluster.backend, transport))
    exits = [number for number, path in enumerate(transport.acts) if path == f"{attempt}/exit.json"]
    assert len(exits) == 2
    assert str(attempt) in transport.acts[exits[0] : exits[1]]


def test_watching_uses_the_cache_too(running, monkeypatch):
    _, _, attempt = running
    transport, looks, look = Counting(), [], RunSurvey.look

    def look_and_end(self, *arguments, **options):
        looks.append(None)
        if len(looks) == 5:
            leave(attempt, "completed")
        return look(self, *arguments, **options)

    monkeypatch.setattr("llmctl.context.Context.connect", lambda *_: transport)
    monkeypatch.setattr(RunSurvey, "look", look_and_end)
    monkeypatch.setattr("llmctl.cli.status.WATCH_INTERVAL_S", 0.01)
    assert main(["status", "--watch"]) == 0
    assert transport.count("heartbeat") == RANKS


def test_a_hang_before_the_time_limit_is_read_from_the_files(running):
    cluster, made, attempt = running
    for rank in range(RANKS):
        beat(attempt, rank, age_s=200, iteration=7 if rank != 3 else 6)
    leave(attempt, "timeout", 137)
    transport = Counting()
    run = observe_run(made.record, transport, SchedulerWatch(cluster.backend, transport))
    assert run.state is JobState.TIMEOUT
    assert "the other ranks wait for rank 3 on n1 (phase forward, iteration 6); llmctl resume" in run.detail

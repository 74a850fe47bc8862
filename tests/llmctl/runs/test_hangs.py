"""Ranks that hang: named while the run is running, and after its end."""

import json
import time
from dataclasses import replace

from llmctl.job_state import JobState
from llmctl.runs import attempts
from llmctl.runs.attempts import DetailsMemory
from llmctl.runs.facts import AttemptFacts, Ending, RankError
from llmctl.runs.hang import lagging_ranks
from llmctl.runs.job_status import SchedulerWatch
from llmctl.runs.observe import observe_run
from llmctl.runs.state import JobAnswer, decide
from tests.llmctl.run_directories import TRANSPORT, beat
from tests.llmctl.runs.test_state import NOW, ended, facts, heartbeat


def test_a_rank_without_a_heartbeat_is_named_with_its_phase():
    beats = [heartbeat(0, 1), heartbeat(1, 200, iteration=5, phase="load data"), heartbeat(2, 2)]
    sentence = lagging_ranks(beats, NOW, 0.5)
    assert sentence == "rank 1 on n1 (phase load data, iteration 5): no heartbeat for 3 min; the other ranks continue"
    assert lagging_ranks(beats, NOW, 100.0) == "", "a rank may have no heartbeat for as long as an iteration takes"


def test_the_rank_that_all_others_wait_for_is_named():
    beats = [heartbeat(0, 100, phase="reduce"), heartbeat(1, 101, phase="forward"), heartbeat(2, 100, phase="reduce")]
    sentence = lagging_ranks(beats, NOW, 0.5)
    assert sentence == "no heartbeat for 100 s; the other ranks wait for rank 1 on n1 (phase forward, iteration 7)"
    assert lagging_ranks([heartbeat(0, 100), heartbeat(1, 100)], NOW, 0.5).endswith(
        "all ranks in phase forward of iteration 7"
    )
    assert lagging_ranks([heartbeat(0, 3), heartbeat(1, 2)], NOW, 0.5) == ""
    assert lagging_ranks([], NOW, None) == ""
    many = [heartbeat(rank, 300) for rank in range(1, 100)]
    assert "and 95 more" in lagging_ranks([heartbeat(0, 1), *many], NOW, 0.5)


def test_a_build_of_kernels_is_shown_and_is_no_hang_of_the_waiting_ranks():
    waiting = heartbeat(1, 100, 0, "building the kernels")
    building = [heartbeat(0, 1, 0, "building the kernels 40%"), heartbeat(2, 2, 0, "building the kernels 7%")]
    detail = decide(facts(attempt=AttemptFacts(1, heartbeats=(waiting, *building)))).detail
    assert detail == "building the kernels 7%"
    slow = heartbeat(0, 100, 0, "building the kernels 40%")
    assert lagging_ranks([waiting, slow], NOW, None) == (
        "no heartbeat for 100 s: all ranks in phase building the kernels 40% of iteration 0"
    )


def test_a_hang_is_told_after_the_time_limit_too():
    # The exit is at NOW - 3; rank 1 stopped first, and rank 0 waited.
    hung = (heartbeat(0, 300, 227, "optimizer"), heartbeat(1, 303, 226, "forward"))
    detail = decide(facts(None, ended("timeout", 137, heartbeats=hung), now=NOW + 9000)).detail
    assert detail == (
        "reached its time limit, after no heartbeat for 4 min; the other ranks wait for rank 1 on n1 (phase forward, "
        "iteration 226); llmctl resume demo-1 continues"
    )
    for alive in ((heartbeat(0, 4), heartbeat(1, 4)), (heartbeat(0, 100), heartbeat(1, 101))):
        slow = facts(None, ended("timeout", 137, heartbeats=alive), iteration_time_s=60.0)
        assert decide(slow).detail == "reached its time limit; llmctl resume demo-1 continues"


def test_a_hang_is_told_if_the_job_was_killed_before_exit_json_was_written():
    """The supervisor's last sign of life is the end: what came after it, such as this query, is not a hang."""
    told = "after no heartbeat for 4 min; the other ranks wait for rank 1 on n1 (phase forward, iteration 226); "
    beats = (heartbeat(0, 5000, 227, "optimizer"), heartbeat(1, 5003, 226, "forward"))
    hung = AttemptFacts(1, heartbeats=beats, alive=NOW - 4740)
    limit = JobAnswer(JobState.TIMEOUT, "the scheduler ended it at its time limit (TIMEOUT)", source="accounting")
    assert decide(facts(limit, hung)).detail == (
        f"{limit.raw} before exit.json could be written, {told}"
        "llmctl resume demo-1 continues from the latest checkpoint"
    )
    assert decide(facts(replace(limit, source="memory"), hung)).detail == f"{limit.raw}, {told}".removesuffix("; ")
    lost = RankError(0, "", "n1", 227, "RuntimeError", "Connection closed by peer", NOW - 4739)
    assert decide(facts(limit, replace(hung, errors=(lost,)))).detail == decide(facts(limit, hung)).detail
    left = JobAnswer(JobState.UNKNOWN, "the job has left the queue", has_left=True)
    assert decide(facts(left, hung)).detail == f"{left.raw}, {told}last heartbeat 83 min ago"
    for alive in (NOW - 4990, None):
        detail = decide(facts(limit, replace(hung, alive=alive))).detail
        assert detail.startswith(f"{limit.raw} before exit.json could be written; last heartbeat 83 min ago; ")


def test_a_hang_is_told_if_another_signal_ended_the_run():
    ending = Ending(137, "failed", "TERM", NOW - 4740)
    beats = (heartbeat(0, 5000, 227, "optimizer"), heartbeat(1, 5003, 226, "forward"))
    hung = AttemptFacts(1, ending=ending, heartbeats=beats)
    detail = decide(facts(None, hung)).detail
    assert "was killed (exit code 137), after no heartbeat for 4 min; the other ranks wait for rank 1" in detail
    assert "heartbeat" not in decide(facts(None, replace(hung, ending=replace(ending, signal=None)))).detail


def live(attempt, *, age_s):
    (attempt / "alive.json").write_text(json.dumps({"time": time.time() - age_s}))


def test_a_hang_is_forgotten_once_there_is_progress_or_another_attempt(cluster):
    made = cluster.run()
    attempt = made.start_attempt()
    for rank in range(2):
        beat(attempt, rank, age_s=900 + rank, iteration=7 - rank)
    live(attempt, age_s=600)
    cluster.backend.says("queue", "17|TIMEOUT|job-demo-1")
    watch = SchedulerWatch(cluster.backend, TRANSPORT)
    assert (
        "after no heartbeat for 5 min; the other ranks wait for rank 1"
        in observe_run(made.record, TRANSPORT, watch).detail
    )
    beat(attempt, 1, age_s=601)
    beat(attempt, 0, age_s=602)
    assert (
        "before exit.json could be written; last heartbeat 10 min ago"
        in observe_run(made.record, TRANSPORT, watch).detail
    )
    live(attempt, age_s=1)
    made.start_attempt(2)
    assert "before exit.json could be written; no heartbeat; " in observe_run(made.record, TRANSPORT, watch).detail


def test_heartbeats_of_a_cache_are_no_hang(cluster, monkeypatch):
    """A newer sign of life beside older heartbeats would look like one."""
    now = time.monotonic()
    monkeypatch.setattr(attempts.time, "monotonic", lambda: now)
    made = cluster.run()
    attempt = made.start_attempt()
    beat(attempt, 0, age_s=100)
    live(attempt, age_s=100)
    cluster.backend.says("queue", "17|TIMEOUT|job-demo-1")
    memory, details = DetailsMemory(), []
    for _ in range(2):
        run = observe_run(made.record, TRANSPORT, SchedulerWatch(cluster.backend, TRANSPORT), memory)
        details.append(run.detail.partition("; ")[0])
        beat(attempt, 0, age_s=1)
        live(attempt, age_s=1)
    assert details == ["the scheduler ended it at its time limit (TIMEOUT) before exit.json could be written"] * 2

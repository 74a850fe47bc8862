"""Following runs: output, end and exit code."""

import os
import re
import signal
import subprocess

import pytest

from llmctl.runs.index import RunIndex
from llmctl.transport.processes import identify
from tests.llmctl.follower import Follower
from tests.llmctl.run_directories import beat, fail, leave, make_run, outcome
from tests.waiting import HANG_S


@pytest.fixture
def index(own_folders):
    return RunIndex(own_folders / "state" / "llmctl")


@pytest.fixture
def run(tmp_path, index):
    """A running run with two ranks."""
    job = subprocess.Popen(["sleep", "10000"], start_new_session=True)
    made = make_run(tmp_path / "runs", "demo-1").submit(identify(job.pid))
    index.add(made.record)
    yield made
    assert job.poll() is None, "following must not end the run"
    job.kill()
    job.wait(HANG_S)


@pytest.fixture
def follow():
    followers = []

    def start(*arguments, **options):
        followers.append(Follower(*arguments, **options))
        return followers[-1]

    yield start
    for follower in followers:
        follower.close()


def write(path, text):
    with path.open("a") as file:
        file.write(text)


def test_a_run_is_followed_from_its_start_to_its_end(run, follow):
    seen = follow("logs", "-f", "demo-1")
    attempt = run.start_attempt()
    write(attempt / "node-00000.log", "loading modules\n")
    seen.wait_for("loading modules\n")
    write(attempt / "rank-00000.log", "iteration 1/100\niter")
    seen.wait_for("iteration 1/100\n")
    write(attempt / "node-00000.log", "iteration 1/100\n")
    write(attempt / "rank-00001.log", "of no interest\n")
    write(attempt / "rank-00000.log", "ation 2/100\nlast words")
    seen.wait_for("iteration 2/100\n")
    outcome(attempt, "completed", 100)
    leave(attempt, "completed")
    assert seen.end() == 0
    assert seen.seen == "loading modules\niteration 1/100\niteration 2/100\nlast words\n"


def test_a_failed_run_gives_6_and_names_the_first_rank_to_fail(run, follow):
    attempt = run.start_attempt()
    write(attempt / "rank-00000.log", "".join(f"line {number}\n" for number in range(500)))
    seen = follow("logs", "-f", "-n", "2", "demo-1")
    seen.wait_for("line 498\nline 499\n")
    fail(attempt, 0, "Connection closed by peer", age_s=1)
    fail(attempt, 1, "CUDA out of memory", age_s=2, host="node7")
    leave(attempt, "failed", 1)
    assert seen.end() == 6
    assert "line 497" not in seen.seen
    assert "llmctl: demo-1 failed: rank 1 (pp 0, dp 1, tp 0) on node7: RuntimeError: CUDA out of memory\n" in seen.seen
    assert seen.seen.endswith("see: llmctl logs demo-1 --rank failed\n")


def test_a_stopped_run_gives_6_and_names_resume(run, follow):
    attempt = run.start_attempt()
    outcome(attempt, "stopped", 42)
    leave(attempt, "stopped")
    seen = follow("logs", "-f", "demo-1")
    assert seen.end() == 6
    assert "stopped at iteration 42, saved; llmctl resume demo-1 continues" in seen.seen


def test_lines_name_their_rank_and_late_ranks_join(run, follow):
    attempt = run.start_attempt()
    write(attempt / "rank-00000.log", "zero\n")
    seen = follow("logs", "-f", "--rank", "all", "demo-1")
    seen.wait_for("zero\n")
    write(attempt / "rank-00001.log", "one\n")
    seen.wait_for("[rank 1] one\n")
    write(attempt / "rank-00000.log", "more\n")
    seen.wait_for("[rank 0] more\n")
    leave(attempt, "completed")
    assert seen.end() == 0


def test_a_hanging_rank_is_reported_once(run, follow):
    attempt = run.start_attempt()
    write(attempt / "rank-00000.log", "hello\n")
    beat(attempt, 0, age_s=1)
    beat(attempt, 1, age_s=100, phase="load data")
    seen = follow("logs", "-f", "demo-1")
    seen.wait_for("rank 1 on n1 (phase load data, iteration 7): no heartbeat for ")
    leave(attempt, "completed")
    assert seen.end() == 0
    assert seen.seen.count("no heartbeat for") == 1


def test_a_build_of_kernels_is_not_a_warning(run, follow):
    attempt = run.start_attempt()
    write(attempt / "rank-00000.log", "hello\n")
    beat(attempt, 0, age_s=1, iteration=0, phase="building the kernels 40%")
    seen = follow("logs", "-f", "demo-1")
    seen.wait_for("hello\n")
    leave(attempt, "completed")
    assert seen.end() == 0
    assert "building" not in seen.seen


def test_a_second_attempt_is_followed_too(run, follow):
    first = run.start_attempt(1)
    write(first / "rank-00000.log", "first\n")
    seen = follow("logs", "-f", "demo-1")
    seen.wait_for("first\n")
    second = run.start_attempt(2)
    write(second / "rank-00000.log", "second\n")
    seen.wait_for("llmctl: attempt 2 of demo-1\nsecond\n")
    leave(second, "completed")
    assert seen.end() == 0


def test_an_interrupt_detaches_and_the_run_continues(run, follow):
    attempt = run.start_attempt()
    write(attempt / "rank-00000.log", "hello\n")
    seen = follow("logs", "-f", "demo-1")
    seen.wait_for("hello\n")
    write(attempt / "rank-00000.log", "again\n")
    seen.wait_for("again\n")
    os.killpg(seen.process.pid, signal.SIGINT)
    assert seen.end() == 130
    assert "demo-1 continues" in seen.seen
    assert "llmctl logs -f demo-1" in seen.seen
    assert "llmctl cancel demo-1" in seen.seen
    assert "Traceback" not in seen.seen


def test_a_terminal_shows_a_progress_line(run, follow):
    attempt = run.start_attempt()
    write(attempt / "rank-00000.log", "[bold]no markup[/bold]\n")
    run.metrics(1, 2)
    seen = follow("logs", "-f", "demo-1", terminal=True)
    seen.wait_for("[bold]no markup[/bold]")
    seen.wait_for("2/100 | loss 9.800 | 5.00k tokens/s | ETA 49s")
    write(attempt / "rank-00000.log", "59/100  loss 4.2000  ETA 0:40\n60/100  loss 4.0000  ETA 0:39\nsaved\n")
    run.metrics(60)
    seen.wait_for("60/100 | loss 4.000")
    seen.wait_for("saved")
    leave(attempt, "completed")
    assert seen.end() == 0
    # The trainer's lines about steps are in the progress line; the last one stays, before what was written after it.
    assert "59/100  loss" not in seen.seen and seen.seen.count("60/100  loss 4.0000  ETA 0:39") == 1
    assert seen.seen.index("60/100  loss 4.0000") < seen.seen.index("saved")
    assert re.search(r"\x1b\[\?25h", seen.seen), "the cursor is shown again"


def test_a_command_shows_its_nodes(tmp_path, index, run, follow):
    job = run.record.submissions[-1].jobs[0]
    made = make_run(tmp_path / "runs", "plain-1", train_iters=None).submit(identify(job.pid))
    index.add(made.record)
    attempt = made.start_attempt()
    write(attempt / "node-00000.log", "left\n")
    write(attempt / "node-00001.log", "right\n")
    write(made.path / "job.log", "from job.sh\n")
    leave(attempt, "failed", 3)
    seen = follow("logs", "-f", "plain-1")
    assert seen.end() == 6
    for line in ("[node 0] left\n", "[node 1] right\n", "[job] from job.sh\n"):
        assert line in seen.seen
    assert seen.seen.endswith("plain-1 failed: ended with exit code 3\nsee: llmctl logs plain-1 --job\n")

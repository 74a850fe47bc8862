"""Reports about real processes: shells that the tests start, and decoys that must survive."""

import os
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from llmctl.transport.processes import boot_id, end_run, identify, is_alive, processes_of_run, read_stat, send_signal
from tests.waiting import HANG_S, wait_for

# A grace beyond the limit of any test: the end of the processes must end the wait.
NEVER_S = 1e6


@contextmanager
def started(*argv, **env):
    """Process in a separate session, which is ended with the test."""
    process = subprocess.Popen(argv, env={**os.environ, **env}, start_new_session=True, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(HANG_S)


def pids(identities):
    return {identity.pid for identity in identities}


def test_an_identity_is_alive_until_it_ends_and_a_zombie_has_ended():
    with started("sleep", "6000") as process:
        identity = identify(process.pid)
        assert is_alive(identity) is True
        process.kill()
        wait_for(lambda: read_stat(process.pid).state == "Z", "a zombie")
        assert is_alive(identity) is False
        assert identify(process.pid) is None


def test_a_recycled_pid_is_another_process_and_is_never_signalled():
    with started("sleep", "6000") as process:
        now = identify(process.pid)
        for other in (replace(now, start_time=now.start_time - 1), replace(now, boot_id="an earlier start")):
            assert is_alive(other) is False
            assert send_signal(other, signal.SIGKILL) is False
        for doubtful in (replace(now, start_time=None), replace(now, boot_id=None)):
            assert is_alive(doubtful) is None
            assert send_signal(doubtful, signal.SIGKILL) is False
        assert process.poll() is None
        assert send_signal(now, signal.SIGKILL) is True
        assert process.wait(HANG_S) == -signal.SIGKILL


def test_a_name_with_spaces_and_parentheses_is_parsed(tmp_path):
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    with started(str(program), "6000") as process:
        assert read_stat(process.pid).parent == os.getpid()
        assert read_stat(process.pid).session == process.pid
    assert boot_id()


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "runs" / "demo-1"
    path.mkdir(parents=True)
    return str(path)


def test_processes_of_a_run_by_environment_session_and_descent(run_dir):
    script = "sleep 6100 & (setsid sleep 6200) & wait"
    with (
        started("bash", "-c", script) as leader,
        started("sleep", "6300", LLMCTL_RUN_DIR=run_dir) as worker,
        started("sleep", "6400", LLMCTL_RUN_DIR=run_dir + "-other") as neighbour,
        started("sleep", "6500", LLMCTL_RUN_DIR=run_dir, LLMCTL_INTERACTIVE="1") as attached,
        started("sleep", "6600") as unrelated,
    ):
        wait_for(lambda: len(processes_of_run(run_dir, [identify(leader.pid)])) >= 4, "all processes of the run")
        found = pids(processes_of_run(run_dir, [identify(leader.pid)]))
        assert {leader.pid, worker.pid} <= found
        assert not found & {neighbour.pid, attached.pid, unrelated.pid, os.getpid()}
        assert pids(processes_of_run(run_dir)) == {worker.pid}
        recycled = replace(identify(leader.pid), start_time=1)
        assert pids(processes_of_run(run_dir, [recycled])) == {worker.pid}
        job = identify(leader.pid)
        members = processes_of_run(run_dir, [job])
        assert end_run(run_dir, [job], grace_s=0, kill_wait_s=HANG_S) == []
        assert not any(is_alive(member) for member in members)
        assert [other.poll() for other in (neighbour, attached, unrelated)] == [None, None, None]


def test_a_run_started_from_within_a_run_is_another_run(run_dir):
    """Neither its own children nor orphans in its session belong to the outer run."""
    sleep = f"LLMCTL_RUN_DIR={run_dir}-inner sleep"
    script = f"({sleep} 6100 &); {sleep} 6200 & wait"
    with started("bash", "-c", script, LLMCTL_RUN_DIR=run_dir) as outer:

        def inner():
            found = processes_of_run(run_dir + "-inner")
            parents = [read_stat(identity.pid).parent for identity in found]
            return pids(found) if len(parents) == 2 and parents.count(outer.pid) == 1 else None

        others = wait_for(inner, "the inner run, and its orphan")
        for leaders in ([], [identify(outer.pid)]):
            found = pids(processes_of_run(run_dir, leaders))
            assert outer.pid in found
            assert not found & others


def test_processes_get_time_to_end_cleanly(run_dir, tmp_path):
    script = (
        f"trap 'sleep 0.3; kill $!; touch {tmp_path}/saved; exit 0' TERM; sleep 6000 & touch {tmp_path}/ready; wait"
    )
    with started("bash", "-c", script, LLMCTL_RUN_DIR=run_dir) as leader:
        wait_for((tmp_path / "ready").exists, "the job")
        assert end_run(run_dir, [identify(leader.pid)], grace_s=NEVER_S) == []
        assert leader.wait(HANG_S) == 0
        assert (tmp_path / "saved").exists()


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace_period(run_dir, tmp_path):
    script = f"trap '' TERM; touch {tmp_path}/ready; (setsid env -u LLMCTL_RUN_DIR sleep 6100) & sleep 6200; wait"
    with started("bash", "-c", script, LLMCTL_RUN_DIR=run_dir) as leader, started("sleep", "6300") as decoy:
        wait_for((tmp_path / "ready").exists, "the job")
        wait_for(lambda: len(processes_of_run(run_dir)) >= 3, "all processes of the run")
        members = processes_of_run(run_dir)
        begun = time.monotonic()
        assert end_run(run_dir, [identify(leader.pid)], grace_s=0.5, kill_wait_s=HANG_S) == []
        assert time.monotonic() - begun >= 0.5
        assert not any(is_alive(member) for member in members)
        assert decoy.poll() is None


def test_the_leader_is_killed_last_so_that_it_can_record_the_end(run_dir, tmp_path):
    script = (
        f"trap : TERM; bash -c \"trap '' TERM; touch {tmp_path}/ready; sleep 6100\" & wait; wait; touch {tmp_path}/end"
    )
    with started("bash", "-c", script, LLMCTL_RUN_DIR=run_dir) as leader:
        wait_for((tmp_path / "ready").exists, "the job")
        assert end_run(run_dir, [identify(leader.pid)], grace_s=0.3, kill_wait_s=HANG_S) == []
        assert leader.wait(HANG_S) == 0
        assert (tmp_path / "end").exists()


def test_leftovers_of_a_killed_leader_get_sigterm_too(run_dir, tmp_path):
    script = f"trap 'touch {tmp_path}/asked; kill $!; exit' TERM; sleep 6000 & touch {tmp_path}/ready; wait"
    with started("sleep", "6100") as leader, started("bash", "-c", script, LLMCTL_RUN_DIR=run_dir) as worker:
        wait_for((tmp_path / "ready").exists, "the job")
        job = identify(leader.pid)
        leader.kill()
        leader.wait(HANG_S)
        assert end_run(run_dir, [job], grace_s=NEVER_S) == []
        assert worker.wait(HANG_S) == 0 or (tmp_path / "asked").exists()


def test_no_process_of_the_tests_is_left(run_dir):
    assert processes_of_run(str(Path(run_dir).parent)) == []

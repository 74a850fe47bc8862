"""``llmctl cancel`` on real processes: ends every process of the run, and no other process."""

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

from llmctl.cli.main import main
from llmctl.runs.index import RunIndex
from llmctl.runs.record import RunRecord
from llmctl.transport.processes import identify, is_alive, processes_of_run
from tests.llmctl.run_directories import TRANSPORT, leave, make_run, recycled
from tests.waiting import HANG_S, wait_for

# A minimal job.sh: makes its attempt, starts two workers in separate sessions, and writes exit.json at its end.
JOB = """
attempt=$LLMCTL_TEST_RUN/attempts/1
until [ -d $attempt/errors ]; do sleep 0.05; done
leave() {
    [ -e $attempt/cancel ] && reason=cancelled || reason=failed
    printf '{"code": 143, "reason": "%s", "signal": "TERM", "time": 5, "node": "n"}' $reason >$attempt/exit.json
}
trap leave EXIT
on_term() { touch $attempt/stop; STOP; }
trap on_term TERM
export LLMCTL_RUN_DIR=$LLMCTL_TEST_RUN LLMCTL_ATTEMPT=1
WORKERS
touch $attempt/ready
while :; do sleep 0.1; done
"""


@pytest.fixture
def index(own_folders):
    return RunIndex(own_folders / "state" / "llmctl")


@pytest.fixture
def decoys(tmp_path):
    """Similar processes: another run's, a user's shell in the run's environment, and an unrelated process."""
    variables = [
        {"LLMCTL_RUN_DIR": str(tmp_path / "runs" / "demo-10"), "LLMCTL_ATTEMPT": "1"},
        {"LLMCTL_RUN_DIR": str(tmp_path / "runs" / "demo-1"), "LLMCTL_ATTEMPT": "1", "LLMCTL_INTERACTIVE": "1"},
        {"SOME_DIR": str(tmp_path / "runs" / "demo-1")},
    ]
    started = [
        subprocess.Popen(["sleep", "2000"], env={**os.environ, **extra}, start_new_session=True) for extra in variables
    ]
    yield started
    survived = [process.poll() for process in started]
    for process in started:
        process.kill()
        process.wait(HANG_S)
    assert survived == [None, None, None]


@pytest.fixture
def start(tmp_path, index):
    """Start a run whose job.sh has these workers and this action on SIGTERM."""
    jobs = []

    def make(run_id, workers, stop):
        run = make_run(tmp_path / "runs", run_id)
        script = JOB.replace("WORKERS", workers).replace("STOP", stop)
        environment = {**os.environ, "LLMCTL_TEST_RUN": str(run.path)}
        job = subprocess.Popen(["bash", "-c", script], env=environment, start_new_session=True, cwd=tmp_path)
        jobs.append((job, str(run.path)))
        identity = identify(job.pid)
        run.submit(identity)
        attempt = run.start_attempt()
        index.add(run.record)
        wait_for((attempt / "ready").exists, "job.sh")
        return SimpleNamespace(run=run, job=job, identity=identity, attempt=attempt)

    yield make
    for job, run_dir in jobs:
        for identity in processes_of_run(run_dir):
            with suppress(ProcessLookupError):
                os.kill(identity.pid, signal.SIGKILL)
        job.kill()
        job.wait(HANG_S)


SLEEPERS = "setsid sleep 2001 & setsid sleep 2002 &"
OBEDIENT = "kill $(jobs -p); exit"


def test_a_run_ends_cleanly_and_the_decoys_survive(start, decoys, index, capsys, frozen_time):
    made = start("demo-1", SLEEPERS, OBEDIENT)
    members = processes_of_run(str(made.run.path), [made.identity])
    assert len(members) >= 3
    assert not {one.pid for one in members} & {decoy.pid for decoy in decoys}
    # A grace beyond the limit of any test: the end of the processes must end the wait.
    assert main(["cancel", "demo-1", "--grace", "100000"]) == 0
    assert capsys.readouterr().out == "demo-1: cancelled\n"
    assert not any(is_alive(member) for member in members)
    assert (made.attempt / "stop").exists()
    assert (made.attempt / "cancel").read_text() == "100000\n"
    record = RunRecord.load(made.run.path, TRANSPORT)
    assert record.submissions[-1].cancel_requested == frozen_time
    assert index.entries()[0].last_state == "cancelled"


def test_a_process_that_does_not_end_is_killed_after_the_grace_period(start, decoys, capsys):
    made = start("demo-1", "setsid bash -c \"trap '' TERM; sleep 2003; sleep 2004\" &", "wait; exit")
    members = processes_of_run(str(made.run.path), [made.identity])
    begun = time.monotonic()
    assert main(["cancel", "demo-1", "--grace", "0.5"]) == 0
    assert time.monotonic() - begun >= 0.5
    assert not any(is_alive(member) for member in members)
    assert (made.attempt / "exit.json").exists()
    assert [decoy.poll() for decoy in decoys] == [None] * 3
    assert "cancelled" in capsys.readouterr().out


def test_a_job_that_ignores_everything_is_killed_and_still_cancelled(start, capsys):
    made = start("demo-1", "trap '' TERM; setsid sleep 2005 &", ":")
    assert main(["cancel", "demo-1", "--grace", "0.2"]) == 0
    assert made.job.wait(HANG_S) == -signal.SIGKILL
    assert "demo-1: cancelled; job.sh" in capsys.readouterr().out


def test_leftovers_of_a_killed_job_sh_are_ended(start, decoys, capsys):
    made = start("demo-1", SLEEPERS, OBEDIENT)
    members = processes_of_run(str(made.run.path), [made.identity])
    made.job.kill()
    made.job.wait(HANG_S)
    assert main(["status", "demo-1"]) == 0
    assert "llmctl cancel demo-1 ends them" in capsys.readouterr().out
    assert main(["cancel", "demo-1"]) == 0
    assert not any(is_alive(member) for member in members)
    assert [decoy.poll() for decoy in decoys] == [None] * 3


def test_a_recycled_pid_is_never_signalled(tmp_path, index, decoys, capsys):
    run = make_run(tmp_path / "runs", "demo-1").submit(recycled(identify(decoys[2].pid)))
    run.start_attempt()
    index.add(run.record)
    assert main(["cancel", "demo-1"]) == 0
    assert capsys.readouterr().out == "demo-1 had already ended: failed; llmctl status demo-1 tells why\n"


def test_an_ended_run_is_reported_as_ended(tmp_path, index, decoys, capsys):
    run = make_run(tmp_path / "runs", "demo-1").submit(recycled(identify(decoys[2].pid)))
    leave(run.start_attempt(), "completed")
    index.add(run.record)
    before = (run.path / "run.json").read_bytes()
    assert main(["cancel", "demo-1"]) == 0
    assert capsys.readouterr().out == "demo-1 had already ended: completed\n"
    assert (run.path / "run.json").read_bytes() == before
    assert not (run.path / "attempts" / "1" / "cancel").exists()


def test_a_failure_does_not_stop_the_cancel_of_other_runs(start, capsys):
    made = start("demo-1", SLEEPERS, OBEDIENT)
    assert main(["cancel", "nonsense", "demo-1", "more-nonsense"]) == 5
    out, err = capsys.readouterr()
    assert "demo-1: cancelled" in out
    assert err.count("llmctl: no run is called") == 2
    assert (made.attempt / "cancel").read_text() == "10\n", "the grace of the profile"
    made.job.wait(HANG_S)
    assert main(["cancel", "nonsense"]) == 5


def test_a_run_on_another_machine_is_left_alone(tmp_path, index, decoys, capsys):
    run = make_run(tmp_path / "runs", "demo-1")
    run.submit(replace(identify(decoys[2].pid), boot_id="of the other machine"))
    run.start_attempt(host="elsewhere")
    index.add(run.record)
    assert main(["cancel", "demo-1"]) == 4
    assert "started on elsewhere" in capsys.readouterr().err


def test_a_renamed_machine_still_ends_its_run(start, capsys):
    made = start("demo-1", SLEEPERS, OBEDIENT)
    started = made.attempt / "started.json"
    started.write_text(started.read_text().replace(socket.gethostname(), "its-name-before"))
    assert main(["cancel", "demo-1"]) == 0
    assert capsys.readouterr().out == "demo-1: cancelled\n"


def test_a_run_whose_directory_was_removed_is_ended(start, decoys, capsys):
    # Like the real job.sh, exits once its agents have ended.
    made = start("demo-1", "setsid sleep 2006 & touch $attempt/ready; wait; exit", OBEDIENT)
    members = processes_of_run(str(made.run.path), [])
    shutil.rmtree(made.run.path)
    assert main(["cancel", "demo-1"]) == 0
    assert "run.json: is not there" in capsys.readouterr().out
    assert not any(is_alive(member) for member in members)
    assert [decoy.poll() for decoy in decoys] == [None] * 3
    assert main(["cancel", "demo-1"]) == 5
    assert main(["status", "demo-1"]) == 0
    assert "to forget the run, remove" in capsys.readouterr().out


def test_two_cancels_at_once_exclude_each_other(start, capsys):
    made = start("demo-1", SLEEPERS, OBEDIENT)
    with TRANSPORT.lock(f"{made.run.path}/.lock"):
        assert main(["cancel", "demo-1"]) == 5
    assert "by another llmctl" in capsys.readouterr().err
    assert made.job.poll() is None
    assert main(["cancel", "demo-1"]) == 0

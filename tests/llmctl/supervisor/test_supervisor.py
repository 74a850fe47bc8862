"""The supervisor of jobs with real processes: attempts, signals, ports, leftovers, and the oldest Python.

``LLMCTL_TEST_SUPERVISOR_PYTHON=/usr/bin/python3.6 python -m pytest tests/llmctl/supervisor`` tests another Python.
"""

import ast
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from llmctl.paths import PACKAGE
from llmctl.supervisor import each_host, processes
from llmctl.supervisor.attempt import Attempt, AttemptError, claim_submission, new_attempt, read_secrets
from llmctl.supervisor.node import rank_of_launcher
from llmctl.supervisor.peers import Peers
from llmctl.supervisor.rendezvous import reserve_port
from llmctl.supervisor.settings import JobSettings
from tests.free_ports import free_ports
from tests.llmctl.submitted_files import record_contents
from tests.waiting import HANG_S, children_of, wait_for

SUCCESS = 'echo "{\\"code\\": 0}" >"$LLMCTL_ATTEMPT_DIR/ended-node-00000.json"\n'
"""A launch line whose only node succeeds."""
PYTHON = os.environ.get("LLMCTL_TEST_SUPERVISOR_PYTHON", sys.executable)
FILES = sorted((PACKAGE / "supervisor").rglob("*.py"))
# All standard modules that the supervisor imports; each of them exists in Python 3.6.
STANDARD = {
    *(
        "abc",
        "argparse",
        "contextlib",
        "ctypes",
        "fcntl",
        "hashlib",
        "importlib",
        "json",
        "math",
        "os",
        "pwd",
        "re",
        "select",
        "shlex",
    ),
    *("shutil", "signal", "socket", "stat", "subprocess", "sys", "time", "types", "typing", "urllib"),
}


def settings(run_dir: Path, **changes: object) -> JobSettings:
    job = JobSettings(
        run_id="r",
        run_dir=str(run_dir),
        submission=1,
        nodes=1,
        ranks_per_node=1,
        is_training=False,
        one_process_per_rank=False,
        ports=free_ports(4),
        port_rule=None,
        stop_grace_s=2,
        stop_after_s=0,
        secrets_file=None,
        secrets_are_read_once=False,
        hosts=(),
        shared=True,
        in_image=False,
        forgets_launchers=False,
    )
    return job._replace(**changes)


def run_job(run_dir: Path, script: str, *arguments: str, **changes: object) -> "subprocess.Popen[str]":
    """A job whose launch part is ``script``, after the line that starts the supervisor."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "job.json").write_text(json.dumps(settings(run_dir, **changes)._asdict()))
    supervisor = shlex.join([PYTHON, "-IB", str(PACKAGE / "supervisor")])
    first = f'[[ -n $1 ]] || exec {supervisor} job --job {shlex.quote(str(run_dir))}/job.json --job-id 7 "${{@:2}}"\n'
    (run_dir / "job.sh").write_text(first + script)
    record_contents(run_dir, int(str(changes.get("submission", 1))))
    return start(run_dir, *arguments)


def start(run_dir: Path, *arguments: str) -> "subprocess.Popen[str]":
    """Start the job.sh of a directory again."""
    argv = ["bash", str(run_dir / "job.sh"), "", *arguments]
    return subprocess.Popen(argv, text=True, stderr=subprocess.PIPE, start_new_session=True)


def ending(run_dir: Path, attempt: int = 1) -> dict[str, object]:
    return json.loads((run_dir / f"attempts/{attempt}/exit.json").read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_supervisor_runs_on_python_3_6(path):
    tree = ast.parse(path.read_text(), feature_version=(3, 6))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    assert imported <= STANDARD
    # Python 3.6 evaluates annotations: built-in types take no parameters, and types have no "|".
    annotations = [node.annotation for node in ast.walk(tree) if isinstance(node, (ast.arg, ast.AnnAssign))]
    annotations += [node.returns for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for annotation in filter(None, annotations):
        for node in ast.walk(annotation):
            assert not isinstance(node, ast.BinOp), ast.unparse(annotation)
            assert not (isinstance(node, ast.Subscript) and ast.unparse(node.value).islower()), ast.unparse(annotation)


def test_simultaneous_attempts_get_different_numbers(tmp_path):
    program = f'touch "$LLMCTL_HOSTFILE"; {SUCCESS}'
    jobs = [run_job(tmp_path, program), *(start(tmp_path) for _ in range(3))]
    assert [job.wait(HANG_S) for job in jobs] == [0] * 4
    assert [ending(tmp_path, number)["reason"] for number in range(1, 5)] == ["completed"] * 4


def test_a_job_records_its_process_and_its_end(tmp_path):
    job = run_job(tmp_path, 'touch "$LLMCTL_HOSTFILE"; kill -SEGV $$\n')
    assert job.wait(HANG_S) == 128 + signal.SIGSEGV
    started = json.loads((tmp_path / "attempts/1/started.json").read_text())
    assert (started["pid"], started["job_id"], started["host"]) == (job.pid, "7", socket.gethostname())
    assert started["boot_id"] == processes.boot_id()
    assert (ending(tmp_path)["code"], ending(tmp_path)["reason"], ending(tmp_path)["signal"]) == (139, "failed", None)


def test_no_process_outlives_its_attempt(tmp_path):
    """Neither a process with a new session nor a process with an empty environment survives."""
    # Seconds that no other test sleeps.
    one, two, three, four = (f"{os.getpid()}{digit}" for digit in range(4))
    all_four = f"pgrep -f '^sleep {os.getpid()}[0-3]$'"
    program = (
        'touch "$LLMCTL_HOSTFILE"\n'
        f"setsid sleep {one} & env -i sleep {two} & (exec env -i bash -c 'sleep {three} & exec sleep {four}') &\n"
        f"until [[ $({all_four} -c) == 4 ]]; do sleep 0.05; done; exit 3\n"
    )
    assert run_job(tmp_path, program).wait(HANG_S) == 3
    assert subprocess.run(["bash", "-c", all_four], capture_output=True, check=False).stdout == b""


def test_only_processes_of_the_attempt_are_ended_with_it(tmp_path):
    run_dir = tmp_path / "r"
    own = {"LLMCTL_RUN_DIR": str(run_dir), "LLMCTL_ATTEMPT": "1", "NODE_RANK": "0"}
    others = {
        "attached shell": {**own, "LLMCTL_INTERACTIVE": "1"},
        "another run": {**own, "LLMCTL_RUN_DIR": f"{run_dir}2"},
        "another attempt": {**own, "LLMCTL_ATTEMPT": "2"},
        "no run": {"NODE_RANK": "0"},
    }
    with ExitStack() as stack:

        def sleeper(variables: dict[str, str]) -> "subprocess.Popen[bytes]":
            process = stack.enter_context(subprocess.Popen(["sleep", "6000"], env={**os.environ, **variables}))
            stack.callback(process.kill)
            return process

        started = {name: sleeper(variables) for name, variables in others.items()}
        assert run_job(run_dir, f'touch "$LLMCTL_HOSTFILE"; {SUCCESS}').wait(HANG_S) == 0
        started["another node"] = sleeper({**own, "NODE_RANK": "1"})
        rank = sleeper(own)
        processes.ask_ranks_to_end(str(run_dir), attempt=1, node=0)
        assert rank.wait(HANG_S) == -signal.SIGTERM
        assert [name for name, process in started.items() if process.poll() is not None] == []


@pytest.mark.parametrize("is_training", [True, False])
def test_a_job_that_does_not_end_after_its_signal_is_killed(tmp_path, is_training):
    program = 'trap "" TERM; touch "$LLMCTL_HOSTFILE" "$LLMCTL_RUN_DIR/begun"; while :; do sleep 0.1; done\n'
    job = run_job(tmp_path, program, is_training=is_training, stop_grace_s=1)
    wait_for((tmp_path / "begun").exists, "the command")
    began = time.monotonic()
    job.send_signal(signal.SIGTERM)
    assert job.wait(HANG_S) == 137
    # The grace period to save, and then the seconds until SIGKILL.
    assert time.monotonic() - began > 10
    assert (tmp_path / "attempts/1/stop").exists()
    assert ending(tmp_path)["reason"] == ("failed" if is_training else "stopped")


def test_ranks_that_have_saved_were_stopped_whatever_becomes_of_their_launcher(tmp_path):
    """scancel and a requeue of Slurm signal srun too, which exits with 1."""
    outcome = """echo '{"reason": "stopped", "iteration": 3, "time": 1}' >"$LLMCTL_ATTEMPT_DIR/outcome.json"; exit 1"""
    loop = 'trap ended TERM; touch "$LLMCTL_HOSTFILE"; while :; do sleep 0.1; done\n'
    job = run_job(tmp_path, f"ended() {{ {outcome}; }}\n{loop}", is_training=True, stop_grace_s=1)
    wait_for((tmp_path / "attempts/1/hostfile").exists, "the launcher")
    job.send_signal(signal.SIGTERM)
    assert job.wait(HANG_S) == 1
    found = ending(tmp_path)
    assert (found["reason"], found["signal"], found.get("class")) == ("stopped", "TERM", None)


def test_a_launcher_that_must_not_be_killed_sees_its_nodes_killed_first(tmp_path):
    """Grid Engine ends the whole job, supervisor included, when a qrsh ends by a signal."""
    program = 'touch "$LLMCTL_HOSTFILE"; until [[ -e $LLMCTL_ATTEMPT_DIR/.end.now ]]; do sleep 0.1; done; exit 9\n'
    job = run_job(tmp_path, program, "--end-by", "file", is_training=True, stop_grace_s=1)
    wait_for((tmp_path / "attempts/1/hostfile").exists, "the launcher")
    job.send_signal(signal.SIGTERM)
    assert job.wait(HANG_S) == 9
    assert (tmp_path / "attempts/1/.end").exists()


def test_a_cancel_file_alone_ends_the_run(tmp_path):
    program = 'touch "$LLMCTL_HOSTFILE"; until [[ -e $LLMCTL_ATTEMPT_DIR/stop ]]; do sleep 0.1; done\n'
    job = run_job(tmp_path, program, is_training=True, stop_grace_s=600)
    wait_for((tmp_path / "attempts/1/hostfile").exists, "the launcher")
    (tmp_path / "attempts/1/cancel").write_text("100000\n")
    assert job.wait(HANG_S) == 0
    assert (ending(tmp_path)["reason"], ending(tmp_path)["signal"]) == ("cancelled", "TERM")


def test_the_time_limit_stops_the_run(tmp_path):
    program = 'touch "$LLMCTL_HOSTFILE"; until [[ -e $LLMCTL_ATTEMPT_DIR/stop ]]; do sleep 0.1; done; exit 5\n'
    job = run_job(tmp_path, program, is_training=True, stop_after_s=1)
    assert "asked to stop at the time limit, after 1 s" in job.communicate(timeout=HANG_S)[1]
    assert (job.returncode, ending(tmp_path)["reason"], ending(tmp_path)["signal"]) == (5, "timeout", "USR1")


def test_a_job_that_begins_after_its_time_limit_launches_nothing(tmp_path):
    job = run_job(tmp_path, f'touch "{tmp_path}/launched"\n', "--end-time", "1000000000", stop_after_s=3600)
    assert "asked to stop at the time limit, which has passed before the launch" in job.communicate(timeout=HANG_S)[1]
    assert (ending(tmp_path)["reason"], ending(tmp_path)["signal"]) == ("timeout", "USR1")
    assert not (tmp_path / "launched").exists()


def test_the_earlier_of_two_limits_stops_the_run(tmp_path):
    program = 'touch "$LLMCTL_HOSTFILE"; until [[ -e $LLMCTL_ATTEMPT_DIR/stop ]]; do sleep 0.1; done; exit 5\n'
    for seconds in (6, 24, 96):
        run_dir = tmp_path / str(seconds)
        ends = str(int(time.time()) + seconds)
        job = run_job(run_dir, program, "--end-time", ends, is_training=True, stop_after_s=3600, stop_grace_s=600)
        asked = re.search(r"at the time limit, after (\d+) s", job.communicate(timeout=HANG_S)[1])
        # A busy machine may need longer than the limit to begin.
        if asked:
            break
    # Half of what is left, as less is left than twice the grace.
    assert asked and 0 < int(asked[1]) <= seconds / 2
    assert (job.returncode, ending(run_dir)["reason"]) == (5, "timeout")


@pytest.mark.parametrize(
    ("left", "signal_told"),
    [("0:59", "USR1"), ("INVALID", "USR1"), ("59:59", "TERM"), ("1-00:00:00", "TERM"), ("UNLIMITED", "TERM")],
)
def test_a_warning_is_of_the_limit_that_holds_now(tmp_path, monkeypatch, left, signal_told):
    """A limit may have been lowered. Without that, an early warning announces a preemption."""
    (tmp_path / "bin").mkdir()
    squeue = tmp_path / "bin/squeue"
    squeue.write_text(f'#!/bin/sh\n[ "$*" = "--noheader --jobs=7 --format=%L" ] && echo {left}\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    program = 'touch "$LLMCTL_HOSTFILE"; until [[ -e $LLMCTL_ATTEMPT_DIR/stop ]]; do sleep 0.1; done; exit 5\n'
    later = str(int(time.time()) + 86400)
    job = run_job(tmp_path / "run", program, "--end-time", later, is_training=True, stop_grace_s=60)
    wait_for((tmp_path / "run/attempts/1/hostfile").exists, "the launcher")
    job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=HANG_S)
    told = ending(tmp_path / "run")
    assert (told["signal"], told["reason"]) == (signal_told, "timeout" if signal_told == "USR1" else "failed")


def test_a_killed_supervisor_has_left_signs_of_life(tmp_path):
    job = run_job(tmp_path, "sleep 60000\n")
    path = tmp_path / "attempts/1/alive.json"
    try:
        wait_for(path.exists, "a sign of life")
        first = wait_for(path.read_text, "its content")
        later = wait_for(lambda: path.read_text() != first and path.read_text(), "another sign of life")
        assert json.loads(first)["time"] < json.loads(str(later))["time"] <= time.time()
    finally:
        # The command is its own group, and without a supervisor nobody ends it. One that lives would see the end.
        for pid in [job.pid, *children_of(job.pid)]:
            os.kill(pid, signal.SIGKILL)
    assert job.wait(HANG_S) == -signal.SIGKILL
    assert not (tmp_path / "attempts/1/exit.json").exists()


def test_exit_codes_with_a_meaning_for_the_scheduler_are_replaced(tmp_path):
    assert run_job(tmp_path, "exit 99\n", "--never-exit", "99,100").wait(HANG_S) == 1
    assert ending(tmp_path)["code"] == 99


def test_one_job_is_one_submission(tmp_path):
    claim_submission(settings(tmp_path), "7")
    claim_submission(settings(tmp_path), "7")
    with pytest.raises(AttemptError, match="job 7 already is submission 1 of r; job 8 starts nothing"):
        claim_submission(settings(tmp_path), "8")
    claim_submission(settings(tmp_path, submission=12), "9")
    with pytest.raises(AttemptError, match="submitted again since .submission 12."):
        claim_submission(settings(tmp_path), "7")
    (tmp_path / "attempts/1").touch()
    assert new_attempt(settings(tmp_path)).number == 2


def test_ports_are_free_and_reserved_for_one_run(tmp_path):
    first, _ = free_ports(6)
    job = settings(tmp_path, ports=(first, first + 2))
    with socket.socket() as listener:
        listener.bind(("", first + 1))
        assert reserve_port(job, "1") == first + 2
    # Reserved by this process, as by another run's supervisor.
    ports = (first, first + 1)
    program = (
        "from tests.llmctl.supervisor.test_supervisor import *; "
        f"print(reserve_port(settings(Path('/'), ports={ports}), '1'))"
    )
    held = reserve_port(settings(tmp_path, ports=ports), "1")
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (held, int(other.stdout)) == (first + 1, first)
    ruled = settings(tmp_path, port_rule=(first + 3, 3), ports=(first + 5, first + 5))
    found = [reserve_port(ruled, job_id) for job_id in ("7.server", "7", "7")]
    assert found == [first + 4, first + 5, None]


def test_a_full_disk_has_room_for_the_end(tmp_path, monkeypatch):
    """A disk without room until the reserve is removed, simulated."""
    attempt = Attempt(1, str(tmp_path))
    attempt.reserve_room()
    replace = os.replace

    def refuse(source, target):
        if (tmp_path / ".reserve").exists():
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    attempt.write_exit(1, "failed", None)
    assert json.loads((tmp_path / "exit.json").read_text())["reason"] == "failed"
    assert not (tmp_path / ".reserve").exists()


def test_secrets_can_be_any_bytes(tmp_path):
    path = tmp_path / "secrets"
    path.write_bytes(b"A\0\xff b\n\0B\0\0")
    values = read_secrets(settings(tmp_path, secrets_file=str(path)))
    assert {name: os.fsencode(value) for name, value in values.items()} == {"A": b"\xff b\n", "B": b""}


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({"OMPI_COMM_WORLD_RANK": "5", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, 5),
        ({"PMI_RANK": "3"}, 3),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "2"}, 2),
        ({"SLURM_PROCID": "2"}, 0),
        ({}, 0),
    ],
)
def test_the_innermost_launcher_knows_the_rank(environ, rank):
    assert rank_of_launcher(environ) == rank


def test_a_rank_does_not_ignore_sigpipe(tmp_path):
    (tmp_path / "attempts/1").mkdir(parents=True)
    (tmp_path / "attempts/1/job.sh").write_text("grep SigIgn /proc/$$/status\n")
    assert run_job(tmp_path, "", "node", "1", "-", "-", "0").wait(HANG_S) == 0
    ignored = int((tmp_path / "attempts/1/node-00000.log").read_text().split()[1], 16)
    assert not ignored & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)


def test_one_command_per_host():
    words = ["qrsh", "-inherit", "%h", "bash", "/r u n/job.sh", "node", "1", "%n"]
    options = {"through_shell": True, "first_here": False}
    assert each_host.commands(words, ["a", "b"], **options)[1] == [
        "qrsh",
        "-inherit",
        "b",
        "bash '/r u n/job.sh' node 1 1",
    ]
    options = {"through_shell": False, "first_here": True}
    first, second = each_host.commands(words, ["a", "b"], **options)
    assert (first, second[:3]) == (["bash", "/r u n/job.sh", "node", "1", "0"], ["qrsh", "-inherit", "b"])


def test_a_machine_without_heartbeats_is_lost_and_a_failed_one_is_reported(tmp_path):
    job = settings(tmp_path, nodes=3, hosts=("a", "b", "c"), stop_grace_s=0)
    (tmp_path / "attempts").mkdir()
    attempt = new_attempt(job)
    peers = Peers(job, attempt, 0)
    Path(attempt.folder, "beat-00001").write_text("0\n")
    Path(attempt.folder, "exit-00002.json").write_text('{"code": 4}')
    found = [failure for _ in range(20) for failure in peers.poll()]
    assert [(failure.node, failure.code, failure.is_silent) for failure in found] == [(2, 4, False), (1, 1, True)]
    assert found[0].sentence == "node 2 (c) ended with exit code 4"
    assert found[1].sentence == "node 1 (b) has sent no heartbeat for 5 s"
    assert peers.all_have_ended

"""Classes of failures and the decision to begin again, as tables and with real processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmctl.paths import PACKAGE
from llmctl.supervisor.ends import PartEnd
from llmctl.supervisor.restarts import (
    Failure,
    History,
    RankFailure,
    Reached,
    class_of,
    culprits_of,
    fruitless_attempts,
    read_history,
    read_rank_failures,
    read_reached,
    refusal,
)
from tests.llmctl.supervisor.test_supervisor import PYTHON, SUCCESS, ending, run_job, settings
from tests.waiting import HANG_S, wait_for

LOST = RankFailure("RuntimeError", "peer failure in 'agreement' (rank 1): Connection closed by peer", True, 1, 1.0)
KILLED = PartEnd(137, 9, 5.0, "n2")
ENDED = PartEnd(143, 15, 5.0, "n2")


def error(kind: str, message: str = "", code: int = 1, when: float = 2.0) -> RankFailure:
    return RankFailure(kind, message, False, code, when)


def unfit(*culprits: str, words: str = "preflight: node n3 (rank 5): clock", when: float = 2.0) -> RankFailure:
    return RankFailure("NodeError", words, False, 1, when, culprits)


@pytest.mark.parametrize(
    ("failure", "culprits"),
    [
        (Failure(1, ranks=(LOST, unfit("n3"))), ["n3"]),
        (Failure(1, ranks=(unfit("n3", "n4"), error("OSError", when=3.0))), ["n3", "n4"]),
        (Failure(1, ranks=(unfit("n3"), error("OSError", when=1.0))), None),
        (Failure(1, ranks=(unfit("n3"),), verdict="hang"), None),
        (Failure(1, ranks=(unfit(),)), None),
        (Failure(1, ranks=(LOST,), lost_node=True), None),
    ],
)
def test_the_nodes_at_fault_are_those_of_the_first_own_error(failure: Failure, culprits: "list[str] | None") -> None:
    assert culprits_of(failure).get("culprits") == culprits


@pytest.mark.parametrize(
    ("value", "read"), [(["n1", 7, "n2"], ("n1", "n2")), ("n1", ()), (7, ()), (None, ()), ({"n1": 1}, ())]
)
def test_hostile_names_of_nodes_are_left_out(tmp_path: Path, value: object, read: "tuple[str, ...]") -> None:
    (tmp_path / "errors").mkdir()
    values = {"type": "NodeError", "message": "", "consequence": False, "time": 1, "exit_code": 1, "culprits": value}
    (tmp_path / "errors/rank-00000.json").write_text(json.dumps(values))
    (found,) = read_rank_failures(str(tmp_path))
    assert found.culprits == read


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (Failure(137, ranks=(LOST,)), "killed"),
        (Failure(1, ranks=(LOST,), parts=(KILLED,)), "killed"),
        (Failure(139), "killed"),
        (Failure(143), "killed"),
        (Failure(143, ranks=(LOST,), parts=(ENDED,)), "lost_peer"),
        (Failure(1, ranks=(LOST, LOST)), "lost_peer"),
        (Failure(1, ranks=(LOST,), lost_node=True), "node"),
        (Failure(143, parts=(ENDED,), lost_node=True), "node"),
        (Failure(137, ranks=(LOST,), verdict="hang"), "hang"),
        (Failure(1, ranks=(LOST, error("NonFiniteError", "losses of the last 10 steps"))), "not_finite"),
        (Failure(1, ranks=(LOST, error("RollBackError", "the loss of iteration 52"))), "roll_back"),
        (Failure(1, ranks=(LOST, error("LossSpikeError", "the loss of iteration 52"))), "spike"),
        (Failure(1, ranks=(error("OutOfMemoryError", "CUDA out of memory. Tried to allocate"),)), "out_of_memory"),
        (Failure(1, ranks=(error("MemoryError"),)), "out_of_memory"),
        (Failure(1, ranks=(error("OSError", "[Errno 12] Cannot allocate memory"),)), "out_of_memory"),
        (Failure(1, ranks=(error("CheckpointError", "cannot be written: No space left on device"),)), "disk"),
        (Failure(1, ranks=(error("OSError", "[Errno 122] Disk quota exceeded: 'x'"),)), "disk"),
        (Failure(3, ranks=(error("DataError", "data.data_path: no file", 3),)), "config"),
        (Failure(1, ranks=(LOST, unfit("n3"))), "node"),
        (Failure(1, ranks=(unfit(words="x: [Errno 28] No space left on device, expected room"),)), "disk"),
        (Failure(2), "config"),
        (Failure(1, ranks=(error("ZeroDivisionError", when=1.0), error("ConfigError", code=3))), "error"),
        (Failure(1, ranks=(error("AcceleratorError", "CUDA error: an illegal memory access"), LOST)), "error"),
        (Failure(1), "unknown"),
        (Failure(3, is_training=False), "error"),
        (Failure(137, is_training=False), "killed"),
    ],
)
def test_the_class_of_a_failure(failure, expected):
    assert class_of(failure) == expected


def reached(*pairs: tuple[int, int]) -> tuple[Reached, ...]:
    return tuple(Reached(number, *pair) for number, pair in enumerate(pairs, 1))


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(100, 90)], ()),
        ([(0, 0)], (1,)),
        ([(0, 0), (0, 0)], (1, 2)),
        ([(100, 90), (100, 90)], (2,)),
        ([(100, 90), (100, 90), (97, 90)], (2, 3)),
        ([(100, 50), (90, 70), (90, 70)], (3,)),
        ([(100, 90), (90, 90), (101, 90)], ()),
    ],
)
def test_attempts_without_a_new_step(pairs, expected):
    assert fruitless_attempts(reached(*pairs)) == expected


ON = ("killed", "lost_peer")


@pytest.mark.parametrize(
    ("failure_class", "history", "left_s", "why"),
    [
        ("killed", History(reached((5, 0)), 0), None, ""),
        ("lost_peer", History(reached((5, 0), (5, 4), (6, 4)), 2), 60.0, ""),
        ("killed", History(reached((5, 0)), 3), None, "job.max_restarts 3 is used up"),
        ("killed", History(reached((5, 0)), 0), 42.4, "42 s are left before the time limit"),
        ("killed", History(reached((5, 0)), 0), -3.0, "0 s are left before the time limit"),
        ("config", History(reached((0, 0)), 0), None, "a new attempt would meet the same error of the config"),
        ("disk", History(reached((5, 0)), 0), None, "the disk is full, or a quota is used up"),
        (
            "not_finite",
            History(reached((5, 0)), 0),
            None,
            "not_finite is not one of job.restart_on (killed, lost_peer)",
        ),
        (
            "killed",
            History(reached((7, 5), (7, 5), (6, 5)), 2),
            None,
            "attempts 2 and 3 have trained and saved nothing beyond iteration 7",
        ),
    ],
)
def test_the_reason_of_a_last_attempt(tmp_path, failure_class, history, left_s, why):
    job = settings(tmp_path, is_training=True, max_restarts=3, restart_on=ON)
    assert refusal(job, failure_class, history, left_s) == why


def test_a_command_has_no_steps_that_could_be_missing(tmp_path):
    job = settings(tmp_path, is_training=False, max_restarts=3, restart_on=("error",))
    assert refusal(job, "error", History(reached((0, 0), (0, 0)), 1), None) == ""


def test_the_facts_come_from_the_run_directory(tmp_path):
    job = settings(tmp_path, submission=2)
    for number, submission, trained, restarts in ((1, 1, 4, True), (2, 2, 8, True), (3, 2, 8, False)):
        folder = tmp_path / f"attempts/{number}"
        folder.mkdir(parents=True)
        (folder / "started.json").write_text(json.dumps({"submission": submission}))
        values = {"trained": trained, "saved": 2, "restarts": restarts}
        (folder / "exit.json").write_text(json.dumps(values))
    for name, text in (("4/heartbeat", '{"iteration": 9}'), ("4/errors", '{"consequence": fal')):
        (tmp_path / "attempts" / name).mkdir(parents=True)
        (tmp_path / "attempts" / name / "rank-00000.json").write_text(text)
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 11}\n{"iteration": 12}\n{"iterat')
    (tmp_path / "saved.json").write_text('{"iteration": 10}')
    ended = read_reached(str(tmp_path), 4)
    assert ended == Reached(4, 12, 10)
    assert read_history(job, ended) == History((Reached(1, 4, 2), Reached(2, 8, 2), Reached(3, 8, 2), ended), 1)
    assert read_rank_failures(str(tmp_path / "attempts/4")) == ()


def test_exit_json_names_the_class_and_the_progress(tmp_path):
    job = run_job(tmp_path, 'touch "$LLMCTL_HOSTFILE"; kill -SEGV $$\n', is_training=True)
    assert job.wait(HANG_S) == 139
    found = ending(tmp_path)
    assert (found["class"], found["trained"], found["saved"]) == ("killed", 0, 0)


LAUNCH = """touch "$LLMCTL_HOSTFILE"
echo "$LLMCTL_ATTEMPT $LLMCTL_MASTER_PORT ${TOKEN-}" >>"$LLMCTL_RUN_DIR/launched"
"""
RESTARTS = {"is_training": True, "max_restarts": 3, "restart_on": ["killed", "error", "unknown"]}


def launched(run_dir: Path) -> list[list[str]]:
    return [line.split() for line in (run_dir / "launched").read_text().splitlines()]


def test_a_failed_attempt_begins_again_in_the_same_job(tmp_path):
    """Each attempt has records of its own, and a port of its own; the secrets stay until the last one."""
    secrets = tmp_path / "secrets"
    secrets.write_bytes(b"TOKEN\0value\0")
    secrets.chmod(0o600)
    script = f"{LAUNCH}((LLMCTL_ATTEMPT == 3)) || kill -KILL $$\n{SUCCESS}"
    changes = {**RESTARTS, "is_training": False, "secrets_file": str(secrets), "secrets_are_read_once": True}
    job = run_job(tmp_path / "run", script, **changes)
    said = job.communicate(timeout=HANG_S)[1]
    assert job.returncode == 0
    assert "attempt 1 failed (killed); begins again, as attempt 2 of at most 4" in said
    found = [ending(tmp_path / "run", number) for number in (1, 2, 3)]
    assert [(one["reason"], one["code"], one.get("restarts")) for one in found] == [
        ("failed", 137, True),
        ("failed", 137, True),
        ("completed", 0, None),
    ]
    assert found[0]["most_attempts"] == found[1]["most_attempts"] == 4
    assert [(one[0], one[2]) for one in launched(tmp_path / "run")] == [("1", "value"), ("2", "value"), ("3", "value")]
    assert len({one[1] for one in launched(tmp_path / "run")}) == 3
    assert not secrets.exists()
    starts = [json.loads((tmp_path / f"run/attempts/{number}/started.json").read_text()) for number in (1, 2, 3)]
    assert {one["pid"] for one in starts} == {job.pid}


def test_a_file_of_secrets_stays_until_the_last_attempt(tmp_path):
    secrets = tmp_path / "secrets"
    secrets.write_bytes(b"TOKEN\0value\0")
    secrets.chmod(0o600)
    script = f'{LAUNCH}[[ -e {secrets} ]] && echo there >>"$LLMCTL_RUN_DIR/there"; exit 5\n'
    job = run_job(tmp_path / "run", script, **{**RESTARTS, "is_training": False}, secrets_file=str(secrets))
    assert job.wait(HANG_S) == 5
    assert (tmp_path / "run/there").read_text() == "there\n" * 4
    assert not secrets.exists()
    assert ending(tmp_path / "run", 4)["not_restarted"] == "job.max_restarts 3 is used up"


def test_a_crash_loop_ends(tmp_path):
    """Rows of the first attempt are new steps; neither the second nor the third adds one."""
    row = 'echo "{\\"iteration\\": 7}" >>"$LLMCTL_RUN_DIR/metrics.jsonl"'
    job = run_job(tmp_path, f"{LAUNCH}{row}; kill -KILL $$\n", **{**RESTARTS, "max_restarts": 9})
    assert job.wait(HANG_S) == 137
    assert [one[0] for one in launched(tmp_path)] == ["1", "2", "3"]
    said = "attempts 2 and 3 have trained and saved nothing beyond iteration 7"
    assert ending(tmp_path, 3)["not_restarted"] == said


@pytest.mark.parametrize(
    ("script", "changes", "why"),
    [
        ("exit 3\n", {}, "a new attempt would meet the same error of the config"),
        ("exit 1\n", {"restart_on": ["killed"]}, "unknown is not one of job.restart_on (killed)"),
        ("exit 1\n", {"stop_after_s": 30}, "s are left before the time limit"),
        ("exit 1\n", {"max_restarts": 0}, None),
    ],
)
def test_an_attempt_that_is_the_last_one(tmp_path, script, changes, why):
    job = run_job(tmp_path, LAUNCH + script, **{**RESTARTS, **changes})
    assert job.wait(HANG_S) != 0
    assert [one[0] for one in launched(tmp_path)] == ["1"]
    assert (why or "") in ending(tmp_path).get("not_restarted", "")
    assert ("not_restarted" in ending(tmp_path)) == (why is not None)


def test_a_signal_or_a_cancel_ends_all_attempts(tmp_path):
    """A cancel of the earlier attempt is one of the attempt that has begun since."""
    wait = "until [[ -e $LLMCTL_ATTEMPT_DIR/stop ]]; do sleep 0.1; done"
    script = f"{LAUNCH}((LLMCTL_ATTEMPT == 2)) || exit 1\n{wait}; exit 1\n"
    for how in ("signal", "cancel"):
        run_dir = tmp_path / how
        job = run_job(run_dir, script, **{**RESTARTS, "stop_grace_s": 600})
        wait_for((run_dir / "attempts/2/hostfile").exists, "the second attempt")
        if how == "signal":
            job.send_signal(signal.SIGTERM)
        else:
            (run_dir / "attempts/1/cancel").write_text("100000\n")
        assert job.wait(HANG_S) == 1
        assert ending(run_dir, 2)["reason"] == ("failed" if how == "signal" else "cancelled")
        assert not ending(run_dir, 2).get("restarts")
        assert not (run_dir / "attempts/3").exists()


def test_a_failure_after_a_cancel_is_the_last_one(tmp_path):
    script = f'{LAUNCH}touch "$LLMCTL_ATTEMPT_DIR/cancel"; exit 1\n'
    job = run_job(tmp_path, script, **RESTARTS)
    assert job.wait(HANG_S) == 1
    assert ending(tmp_path)["reason"] == "cancelled"
    assert not (tmp_path / "attempts/2").exists()


def test_a_cancel_between_two_attempts_launches_nothing(tmp_path):
    """Who cancelled saw the first attempt as the newest one."""
    for number in (1, 2):
        (tmp_path / f"attempts/{number}").mkdir(parents=True)
    (tmp_path / "attempts/1/cancel").write_text("7\n")
    (tmp_path / "job.json").write_text(json.dumps(settings(tmp_path)._asdict()))
    program = """import sys
from llmctl.supervisor.attempt import Attempt
from llmctl.supervisor.end_request import EndBySignal
from llmctl.supervisor.settings import JobSettings
from llmctl.supervisor.signals import Signals
from llmctl.supervisor.watch import Watch
job = JobSettings.read(sys.argv[1] + "/job.json")
first, second = (Attempt(number, job.attempt_dir(number)) for number in (1, 2))
watch = Watch(job, second, Signals(), EndBySignal(), stop_after_s=0, earlier=first)
print(watch.is_over, watch.reason(0))
"""
    argv = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(argv, cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    assert done.stdout == "True cancelled\n"
    assert (tmp_path / "attempts/2/cancel").read_text() == "7\n"


def test_processes_of_an_earlier_attempt_are_gone_before_the_next_begins(tmp_path):
    """Another node does not see the end of its launcher: its own part ends what is left there."""
    job = settings(tmp_path)
    (tmp_path / "attempts/2").mkdir(parents=True)
    (tmp_path / "attempts/2/job.sh").write_text("echo here\n")
    (tmp_path / "job.json").write_text(json.dumps(job._asdict()))
    own = {**os.environ, "LLMCTL_RUN_DIR": str(tmp_path)}
    with subprocess.Popen(["sleep", "6000"], env={**own, "LLMCTL_ATTEMPT": "1"}, start_new_session=True) as left:
        argv = [PYTHON, "-IB", str(PACKAGE / "supervisor"), "job", "--job", f"{tmp_path}/job.json", "--job-id", "7"]
        assert subprocess.run([*argv, "node", "2", "-", "-", "0"], check=False).returncode == 0
        assert left.wait(HANG_S) == -signal.SIGKILL
    assert (tmp_path / "attempts/2/node-00000.log").read_text() == "here\n"

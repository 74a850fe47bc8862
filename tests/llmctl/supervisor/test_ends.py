"""Ends of nodes and ranks, and the cause of a failed attempt."""

import json
import os
import signal
import socket
import time

import pytest

from llmctl.supervisor import ends
from llmctl.supervisor.attempt import Attempt
from llmctl.supervisor.cause import cause_of_failure, code_of_cause, launchers_error
from tests.llmctl.supervisor.test_supervisor import ending, run_job, settings
from tests.waiting import HANG_S, wait_for


def test_the_cause_gives_the_exit_code(tmp_path):
    (tmp_path / "errors").mkdir()
    records = [(True, 1.0, 9), (False, 3.0, 1), (False, 2.0, 3)]
    for rank, (consequence, when, code) in enumerate(records):
        values = {"message": '"consequence": false', "consequence": consequence, "time": when, "exit_code": code}
        (tmp_path / f"errors/rank-{rank:05d}.json").write_text(json.dumps(values))
    (tmp_path / "errors/rank-00009.json").write_text('{"consequence": false, "ti')
    assert code_of_cause(str(tmp_path), 137) == 3
    assert code_of_cause(str(tmp_path / "none"), 137) == 137


@pytest.mark.parametrize(
    ("file", "words", "code"),
    [
        ("node-00001.log", "E1124 api.py:874] failed (exitcode: -9) local_rank: 1 (pid: 7) of binary: python", 137),
        (
            "node-00000.log",
            "failed (exitcode: -15) local_rank: 0 (pid: 7)\nfailed (exitcode: -11) local_rank: 1 (",
            139,
        ),
        ("node-00000.log", "failed (exitcode: 1) local_rank: 0 (pid: 7)", 143),
        ("../../job.log", "srun: error: node3: tasks 4-5: Killed\nsrun: error: node1: task 0: Terminated\n", 137),
    ],
)
def test_a_killed_rank_gives_its_own_code(tmp_path, file, words, code):
    """The launcher's 143 is the code of the ranks that it ended next."""
    folder = tmp_path / "attempts" / "1"
    folder.mkdir(parents=True)
    (folder / file).write_text(words)
    assert code_of_cause(str(folder), 143) == code


def test_success_without_a_part_that_ran_is_a_failure(tmp_path):
    program = 'touch "$LLMCTL_HOSTFILE"; echo "srun: error: no plugin" >>"$LLMCTL_RUN_DIR/job.log"\n'
    job = run_job(tmp_path, program)
    said = (
        "no node started its part: the launcher ended with exit code 0 and the error 'srun: error: no plugin'; "
        "its output is in `llmctl logs r --job`"
    )
    assert f"llmctl: {said}" in job.communicate(timeout=HANG_S)[1]
    assert job.returncode == 1
    found = ending(tmp_path)
    assert (found["code"], found["reason"], found["cause"]) == (1, "failed", said)


@pytest.mark.parametrize(
    ("files", "changes", "doubt"),
    [
        ({}, {}, "no node started its part"),
        ({"node-00000.log": "", "ended-node-00000.json": '{"code": 0}'}, {}, "node 1 on b did not start"),
        (
            {"node-00000.log": "", "node-00001.log": "", "ended-node-00000.json": '{"code": 0}'},
            {},
            "node 1 on b did not record an end",
        ),
        (
            {"node-00000.log": "", "ended-rank-00000.json": '{"code": 0}', "ended-rank-00001.json": '{"co'},
            {"one_process_per_rank": True, "ranks_per_node": 2, "nodes": 1},
            "rank 1 on a did not record an end",
        ),
        (
            {"ended-node-00000.json": '{"code": 0}', "ended-node-00001.json": '{"code": 4}'},
            {},
            "node 1 on b failed with exit code 4",
        ),
        (
            {"ended-node-00000.json": '{"code": 0}', "ended-node-00001.json": '{"code": 0}'},
            {"is_training": True},
            "rank 0 did not record an end of the training",
        ),
        (
            {
                "ended-node-00000.json": '{"code": 0}',
                "ended-node-00001.json": '{"code": 0}',
                "outcome.json": '{"reason": "completed"}',
            },
            {"is_training": True},
            "",
        ),
        ({"ended-node-00000.json": '{"code": 0}'}, {"hosts": ("a", "b"), "shared": False}, ""),
    ],
)
def test_what_is_missing_for_a_success_is_named(tmp_path, monkeypatch, files, changes, doubt):
    monkeypatch.setattr(ends, "VISIBLE_S", 0.0)
    (tmp_path / "hostfile").write_text("a slots=1\nb slots=1\n")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    job = settings(tmp_path, **{"nodes": 2, **changes})
    assert ends.doubt_about_success(job, Attempt(1, str(tmp_path)), node=0) == doubt


def test_a_late_record_is_waited_for(tmp_path, monkeypatch):
    """The record of another node becomes visible between two looks."""
    monkeypatch.setattr(ends, "VISIBLE_S", HANG_S)
    monkeypatch.setattr(time, "sleep", lambda _: (tmp_path / "ended-node-00000.json").write_text('{"code": 0}'))
    assert ends.doubt_about_success(settings(tmp_path), Attempt(1, str(tmp_path)), node=0) == ""


def test_a_node_records_how_its_command_ended(tmp_path):
    attempt = tmp_path / "attempts/1"
    attempt.mkdir(parents=True)
    seen = {}
    for node, (script, more) in enumerate({"exit 3": (), "kill -9 $$": (), "kill -8 $$": ("--end-by", "file")}.items()):
        (attempt / "job.sh").write_text(script)
        code = run_job(tmp_path, "", *more, "node", "1", "-", "-", str(node)).wait(HANG_S)
        end = ends.read_ends(str(attempt))[f"node-{node:05d}"]
        seen[script] = (code, end.code, end.signal, end.host)
    host = socket.gethostname()
    assert seen == {
        "exit 3": (3, 3, 0, host),
        "kill -9 $$": (137, 137, 9, host),
        "kill -8 $$": (136, 136, 8, host),
    }


def test_a_node_outlives_the_signal_that_ends_its_command(tmp_path):
    """The launcher signals the process group; the command gets the signal once."""
    (tmp_path / "attempts/1").mkdir(parents=True)
    program = (
        "trap 'echo got >>\"$LLMCTL_RUN_DIR/got\"; sleep 1; exit 6' TERM\n"
        'touch "$LLMCTL_RUN_DIR/begun"; while :; do sleep 0.1; done\n'
    )
    (tmp_path / "attempts/1/job.sh").write_text(program)
    node = run_job(tmp_path, "", "node", "1", "-", "-", "0")
    wait_for((tmp_path / "begun").exists, "the command")
    os.killpg(node.pid, signal.SIGTERM)
    assert node.wait(HANG_S) == 6
    assert ends.read_ends(str(tmp_path / "attempts/1"))["node-00000"].code == 6
    assert (tmp_path / "got").read_text() == "got\n"


def record_end(folder, name, code, number, when, host="n4"):
    values = {"code": code, "signal": number, "time": when, "host": host}
    (folder / f"ended-{name}.json").write_text(json.dumps(values))


@pytest.mark.parametrize(("own", "launcher", "code"), [(3, 143, 3), (1, 143, 1), (3, 137, 3), (143, 143, 143)])
def test_the_part_that_failed_first_gives_the_exit_code(tmp_path, own, launcher, code):
    """The launcher's code is that of a part that the launcher ended next."""
    record_end(tmp_path, "node-00000", launcher, launcher - 128, 8.0)
    record_end(tmp_path, "node-00001", own, 15 if own > 128 else 0, 7.0)
    record_end(tmp_path, "node-00002", 0, 0, 6.0)
    assert code_of_cause(str(tmp_path), launcher) == code


@pytest.mark.parametrize(("own", "code"), [(3, 3), (1, 1), (137, 137), (143, 143)])
def test_the_node_that_failed_first_gives_the_exit_code_of_a_command(tmp_path, own, code):
    """srun ends the other node by SIGTERM, and exits with the highest code."""
    program = f'touch "$LLMCTL_HOSTFILE"; cp "$LLMCTL_RUN_DIR"/ended-* "$LLMCTL_ATTEMPT_DIR"; exit {max(own, 143)}\n'
    record_end(tmp_path, "node-00000", 143, 15, 8.0)
    record_end(tmp_path, "node-00001", own, max(0, own - 128), 7.0)
    assert run_job(tmp_path, program, nodes=2).wait(HANG_S) == code
    assert (ending(tmp_path)["code"], ending(tmp_path)["reason"]) == (code, "failed")


def test_a_command_that_was_stopped_has_the_code_of_its_launcher(tmp_path):
    """The supervisor kills what is left of a stopped run, and a node may still record that."""
    copy = 'cp "$LLMCTL_RUN_DIR"/ended-* "$LLMCTL_ATTEMPT_DIR"'
    program = f'touch "$LLMCTL_HOSTFILE"; {copy}; touch "$LLMCTL_ATTEMPT_DIR/cancel"; sleep {HANG_S}\n'
    record_end(tmp_path, "node-00000", 137, 9, 8.0)
    assert run_job(tmp_path, program, nodes=2).wait(HANG_S) == 143
    assert (ending(tmp_path)["code"], ending(tmp_path)["signal"]) == (143, "TERM")


def test_the_part_that_a_signal_ended_first_is_the_cause(tmp_path):
    attempt, job = Attempt(1, str(tmp_path)), settings(tmp_path, nodes=2, is_training=True)
    record_end(tmp_path, "node-00000", 143, 15, 8.0)
    record_end(tmp_path, "node-00001", 137, 9, 7.0)
    (tmp_path / "node-00000.log").write_text("failed (exitcode: -6) local_rank: 0 (pid: 7)")
    assert cause_of_failure(job, attempt, "", "") == "torchrun on n4 was ended by signal 9"
    assert code_of_cause(str(tmp_path), 1) == 137
    record_end(tmp_path, "node-00000", 143, 15, 6.0)
    assert cause_of_failure(job, attempt, "", "") == ""
    assert code_of_cause(str(tmp_path), 143) == 134
    assert cause_of_failure(job, attempt, "node 1 (b) has sent no heartbeat for 5 s", "") != ""


def test_the_last_words_are_the_cause_if_no_rank_began(tmp_path):
    attempt, job = Attempt(1, str(tmp_path)), settings(tmp_path)
    log = "llmctl: importing docker://x to /x\n[ERROR] 404\nllmctl: docker://x cannot be imported to /x\nmore\n"
    assert cause_of_failure(job, attempt, "", log) == "docker://x cannot be imported to /x"
    assert cause_of_failure(job, attempt, "", log.splitlines()[0]) == ""
    assert cause_of_failure(job, attempt, "", "srun: error: no node\n") == "srun: error: no node"
    (tmp_path / "heartbeat").mkdir()
    assert cause_of_failure(job, attempt, "", log) == ""


def test_a_task_that_the_launcher_ended_itself_is_not_the_cause():
    own, ended = (
        "srun: error: n2: task 1: Exited with exit code 126",
        "srun: error: n1: task 0: Exited with exit code 143",
    )
    assert launchers_error(f"{own}\nsrun: launch/slurm: _step_signal\n{ended}\n") == own
    assert launchers_error(f"{ended}\n") == ended
    assert launchers_error(f"{own}\nsrun: error: n1: task 0: Terminated\n") == own

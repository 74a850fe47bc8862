"""Leftovers of jobs that end before their ranks start, and of failed or interrupted submits."""

import json
import os
import signal

import pytest

from llmctl.cli.main import main
from llmctl.runs.record import RunRecord
from llmctl.submit import execute
from tests.llmctl.run_directories import TRANSPORT
from tests.waiting import wait_for

CONFIG = """
model: {num_layers: 1, hidden_size: 16, num_attention_heads: 1}
training: {train_iters: 1, seq_length: 16}
optimizer: {lr: 1.0e-3}
data: {mock_data: true}
"""


@pytest.fixture
def place(home, monkeypatch):
    """An empty home whose jobs call a program ``gate`` while their environment is loaded."""
    monkeypatch.setenv("TOKEN", "hidden")
    (home / "c.yaml").write_text(CONFIG)
    return home


def set_up_lines(place, *lines):
    folder = place / "config" / "llmctl" / "clusters"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "local.yaml").write_text(json.dumps({"environment": {"setup": list(lines)}}))


def ending(place, run_id):
    path = place / "runs" / run_id / "attempts/1/exit.json"
    wait_for(path.exists, str(path))
    return json.loads(path.read_text())


@pytest.mark.parametrize("what", [("c.yaml",), ("--", "touch", "begun")], ids=["training", "command"])
def test_a_job_stopped_before_its_ranks_start_starts_none(place, what):
    set_up_lines(
        place,
        f"if [[ ${{LLMCTL_ATTEMPT:-}} ]]; then : >{place}/loading; while :; do sleep 0.05; done; fi",
    )
    assert main(["submit", "--run-id", "r", *what]) == 0
    wait_for((place / "loading").exists, "the environment")
    os.kill(RunRecord.load(place / "runs/r", TRANSPORT).submissions[-1].jobs[0].pid, signal.SIGTERM)
    end = ending(place, "r")
    assert (end["reason"], end["signal"], end["code"]) == ("stopped", "TERM", 0)
    assert not (place / "begun").exists()
    assert not (place / "runs/r/attempts/1/hostfile").exists()


def test_secrets_are_removed_if_the_environment_cannot_be_loaded(place):
    set_up_lines(place, "exit 3")
    assert main(["submit", "--run-id", "r", "--secret", "TOKEN", "--", "true"]) == 0
    assert ending(place, "r")["reason"] == "failed"
    assert list((place / "state/llmctl/secrets").iterdir()) == []


def test_a_secret_given_by_value_is_not_repeated(capsys):
    assert main(["submit", "--secret", "TOKEN=hidden", "--", "true"]) == 2
    message = capsys.readouterr().err
    assert "TOKEN" in message
    assert "hidden" not in message


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_submit_interrupted_before_the_start_leaves_nothing(place, capsys, monkeypatch, error):
    def cut_off(*_):
        raise error

    monkeypatch.setattr(execute, "secrets_bytes", cut_off)
    assert main(["submit", "--run-id", "r", "--secret", "TOKEN", "--", "true"]) in (3, 130)
    assert not (place / "runs/r").exists()
    assert "Errno" not in capsys.readouterr().err
    assert list((place / "state").rglob("*.json")) == []


@pytest.mark.usefixtures("place")
def test_a_resume_interrupted_before_the_start_leaves_the_record_unchanged(place, monkeypatch):
    assert main(["submit", "--run-id", "r", "--", "true"]) == 0
    ending(place, "r")
    before = RunRecord.load(place / "runs/r", TRANSPORT)

    def cut_off(*_, **__):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(execute, "_start", cut_off)
    assert main(["resume", "r", "--set", "job.env.A=b"]) == 3
    assert RunRecord.load(place / "runs/r", TRANSPORT) == before


def test_variables_of_the_user_reach_the_command_and_not_the_script(place, capsys):
    names = ("nodes", "code", "attempt", "agents", "signal", "secrets", "port", "node", "command", "attempt_dir")
    given = [word for name in names for word in ("--env", f"{name}=7 {name}")]
    given += ["--env", "PATH=/nowhere", "--env", "PYTHONPATH=/theirs", "--env", "LLMCTL_RUN_DIR=/not/this"]
    assert main(["submit", "--run-id", "r", *given, "--secret", "TOKEN", "--", "/usr/bin/env"]) == 0
    assert ending(place, "r") == {**ending(place, "r"), "code": 0, "reason": "completed"}
    assert main(["logs", "r", "-n", "1000"]) == 0
    printed = {line.removeprefix("[node 0] ") for line in capsys.readouterr().out.splitlines()}
    run_dir = place / "runs/r"
    assert {f"{name}=7 {name}" for name in names} <= printed
    assert {"PATH=/nowhere", "TOKEN=hidden", "NNODES=1", f"LLMCTL_RUN_DIR={run_dir}"} <= printed
    assert f"PYTHONPATH={run_dir}/code/user:/theirs" in printed


@pytest.mark.usefixtures("place")
def test_a_submit_interrupted_during_the_start_names_llmctl_status(place, capsys, monkeypatch):
    def cut_off(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(execute, "_start", cut_off)
    assert main(["submit", "--run-id", "r", "--", "true"]) == 130
    assert (place / "runs/r/run.json").exists()
    assert "r may have been submitted before the interrupt: llmctl status r" in capsys.readouterr().err

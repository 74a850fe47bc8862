"""Preflights of real runs on this machine: sound nodes, and a rank that is slow."""

import json
import re
import socket

import pytest

from llmctl.cli.main import main
from tests.llmctl.operate.faulty_training import write_training
from tests.llmctl.submit.test_submit import attempt_of, ending

FAULTS = """
import os
from dataclasses import replace
from trainer.preflight import check

whole = check.Instruments

def slow():
    return replace(whole(), speed=lambda device, is_again: whole().speed(device, is_again) / 10)

if os.environ.get("SLOW") == os.environ["RANK"]:
    check.Instruments = slow

def rate(step, config):
    return config.optimizer.lr
"""


@pytest.fixture
def place(home, monkeypatch):
    monkeypatch.chdir(write_training(home, FAULTS, 2, {"hooks": {"lr_function": "faults:rate"}}))
    return home


def status(capsys, run_id):
    capsys.readouterr()
    assert main(["status", run_id, "--json"]) == 0
    run = json.loads(capsys.readouterr().out)["runs"][0]
    assert main(["status", run_id]) == 0
    return run, capsys.readouterr().out


def test_sound_nodes_train_and_status_says_nothing(place, capsys):
    assert main(["submit", "c.yaml", "--run-id", "sound", "--preflight", "quick"]) == 0
    assert ending(place, "sound")["reason"] == "completed"
    assert json.loads((attempt_of(place, "sound") / "preflight.json").read_text())["passed"] is True
    run, page = status(capsys, "sound")
    assert run["state"] == "completed" and "preflight" not in page


def test_a_slow_node_ends_the_attempt_and_is_named(place, capsys):
    assert main(["submit", "c.yaml", "--run-id", "slow", "--preflight", "quick", "--env", "SLOW=1"]) == 0
    host = socket.gethostname()
    found = ending(place, "slow")
    assert (found["reason"], found["class"], found["culprits"], found["code"]) == ("failed", "node", [host], 1)
    run, page = status(capsys, "slow")
    sentence = rf"preflight: node {re.escape(host)} \(rank 1\): speed of a matrix product: \S+ TFLOP/s, 0\.\d\d of the "
    assert re.search(
        sentence + r"median, expected 0\.7 of \S+ TFLOP/s; leave the node out with --exclude", run["detail"]
    )
    assert "leave the node out with --exclude" in " ".join(page.split())
    assert not (place / "runs/slow/metrics.jsonl").exists()


@pytest.mark.proof
@pytest.mark.usefixtures("place")
def test_without_the_flag_nothing_is_measured(place):
    assert main(["submit", "c.yaml", "--run-id", "plain", "--env", "SLOW=1"]) == 0
    assert ending(place, "plain")["reason"] == "completed"
    assert not (attempt_of(place, "plain") / "preflight.json").exists()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["c.yaml", "--preflight", "deep"], 2, "--preflight: 'deep' is not valid: input should be 'off' or 'quick'"),
        (
            ["--preflight", "quick", "--", "true"],
            2,
            "--preflight: a COMMAND has none, as the trainer itself checks the nodes",
        ),
    ],
)
@pytest.mark.usefixtures("place")
def test_refused_preflights(words, code, says, capsys):
    assert main(["submit", "--run-id", "r", "--dry-run", *words]) == code
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.usefixtures("place")
def test_off_without_quotes_is_no_truth_value(capsys):
    assert main(["submit", "c.yaml", "--run-id", "r", "--dry-run", "--set", "job.preflight=off"]) == 0
    capsys.readouterr()

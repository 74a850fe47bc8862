"""``llmctl data``: the trainer's commands in the jobs' environment, and real runs."""

import json

import pytest

from llmctl.cli.main import main

PYTHON = """#!/bin/bash
# Stand-in for a job's Python: answers the probe, and records the command that it gets.
if [[ $1 == -c ]]; then echo "3.12.1 2.11.0 - 0"; exit; fi
printf '%s\\n' "$@" >"$NOTES/argv"
exit "${STATUS-0}"
"""


@pytest.fixture
def login_node(tmp_path, monkeypatch):
    """This machine as the login node of cluster lab; returns the folder of its notes."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("NOTES", str(tmp_path))
    monkeypatch.delenv("LLMCTL_RUNS_ROOT", raising=False)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    profile = {
        "scheduler": "slurm",
        "runs_root": str(tmp_path / "runs"),
        "environment": {"python": str(python)},
        "rendezvous": {"interface": "ib0"},
    }
    (tmp_path / "config/llmctl/clusters").mkdir(parents=True)
    (tmp_path / "config/llmctl/clusters/lab.yaml").write_text(json.dumps(profile))
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "a b", "c"],
        ["inspect", "a", "--verify", "--json", "--samples", "0", "--tokenizer-model", "t", "--vocab-file", "v"],
        ["inspect", "--tokenizer", "t", "--special-tokens", "<E>", "--special-tokens", "<F>", "a"],
        ["merge", "a", "b", "--output", "c"],
        ["merge", "--input", "a", "b", "--output-prefix", "c"],
    ],
)
def test_flags_reach_the_trainer(login_node, monkeypatch, words):
    monkeypatch.setenv("STATUS", "3")
    assert main(["data", *words, "--cluster", "lab"]) == 3
    assert (login_node / "argv").read_text().splitlines() == ["-m", "trainer", "data", *words]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["inspect", "a", "--samples", "-1"], "llmctl data inspect: argument --samples: '-1' is not a number"),
        (["inspect"], "llmctl data inspect: no input was given; name files or folders"),
        (["merge", "a"], "llmctl data merge: the following arguments are required: --output"),
        (["merge", "a", "--output", "b", "--tok", "t"], "llmctl data merge: unrecognized arguments: --tok"),
        (
            ["prepare", "a", "--output", "b", "--max-documents", "5"],
            "llmctl data prepare: --max-documents: all documents",
        ),
    ],
)
def test_wrong_flags_are_an_error_and_start_nothing(login_node, capsys, words, says):
    assert main(["data", *words, "--cluster", "lab"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(says) and message.count("\n") == 1
    assert not (login_node / "argv").exists()


@pytest.mark.parametrize("command", ["prepare", "inspect", "merge"])
def test_help_shows_the_flags_of_trainer_and_job(capsys, command):
    assert main(["data", command, "--help"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"usage: llmctl data {command} ")
    assert "--input" in output and "--cluster NAME" in output


def test_the_local_cluster_runs_the_command_here(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("LLMCTL_RUNS_ROOT", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    assert main(["data", "inspect", "nothing", "--json"]) == 3
    output = capfd.readouterr()
    assert json.loads(output.out)["pairs"][0]["problems"][0].startswith("nothing.bin and nothing.idx: no such file")

"""``llmctl data``: the trainer's commands in the jobs' own environment, and on this machine for real."""

import json

import pytest

from llmctl.cli.main import main

PYTHON = """#!/bin/bash
# A stand-in of a job's Python: answers the probe, and notes what it is asked to run.
if [[ $1 == -c ]]; then echo "3.12.1 2.11.0 -"; exit; fi
printf '%s\\n' "$@" >"$NOTES/argv"
exit "${STATUS-0}"
"""


@pytest.fixture
def login_node(tmp_path, monkeypatch):
    """This machine as the login node of a cluster called lab; gives the folder of its notes."""
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
    ("words", "asked"),
    [
        (["inspect", "a b", "c"], ["inspect-data", "--samples", "3", "--", "a b", "c"]),
        (
            ["inspect", "a", "--verify", "--json", "--samples", "0", "--tokenizer-model", "t", "--tokenizer-type", "k"],
            [
                "inspect-data",
                "--samples",
                "0",
                "--tokenizer-model",
                "t",
                "--tokenizer-type",
                "k",
                "--verify",
                "--json",
                "--",
                "a",
            ],
        ),
        (
            ["inspect", "a", "--vocab-file", "v", "--merge-file", "m"],
            ["inspect-data", "--samples", "3", "--vocab-file", "v", "--merge-file", "m", "--", "a"],
        ),
        (
            ["inspect", "a", "--tokenizer", "t", "--tiktoken-pattern", "v1", "--special-tokens", "<E>"],
            [
                *("inspect-data", "--samples", "3", "--tokenizer-model", "t", "--tiktoken-pattern", "v1"),
                *("--tokenizer-special-tokens", "<E>", "--", "a"),
            ],
        ),
        (
            [*("inspect", "a", "--tiktoken-num-special-tokens", "10"), "--tokenizer-hf-include-special-tokens"],
            [
                *("inspect-data", "--samples", "3", "--tiktoken-num-special-tokens", "10"),
                *("--tokenizer-hf-include-special-tokens", "--", "a"),
            ],
        ),
        (["merge", "a", "b", "--output", "c"], ["merge-data", "--output-prefix=c", "--input", "a", "b"]),
    ],
)
def test_flags_reach_the_trainer(login_node, monkeypatch, words, asked):
    monkeypatch.setenv("STATUS", "3")
    assert main(["data", *words, "--cluster", "lab"]) == 3
    assert (login_node / "argv").read_text().splitlines() == ["-m", "trainer", *asked]


def test_on_this_machine(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("LLMCTL_RUNS_ROOT", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    assert main(["data", "inspect", "nothing", "--json"]) == 3
    said = capfd.readouterr()
    assert json.loads(said.out)["pairs"][0]["problems"][0].startswith("nothing.bin and nothing.idx: no such file")

"""``llmctl checkpoint``: the trainer's commands in the jobs' environment, and runs in the place of checkpoints."""

import json

import pytest

from llmctl.cli.main import main
from llmctl.paths import UserFolders
from llmctl.runs.index import RunIndex
from llmctl.runs.record import RunRecord

PYTHON = """#!/bin/bash
# Stand-in for a job's Python: answers the probe, and records the command that it gets.
if [[ $1 == -c ]]; then echo "3.12.1 2.11.0 - 0"; exit; fi
printf '%s\\n' "$@" >"$NOTES/argv"
exit "${STATUS-0}"
"""


@pytest.fixture
def login_node(tmp_path, monkeypatch):
    """This machine as the login node of cluster lab, and as another; returns the folder of its notes."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("NOTES", str(tmp_path))
    monkeypatch.delenv("LLMCTL_RUNS_ROOT", raising=False)
    monkeypatch.delenv("LLMCTL_CLUSTER", raising=False)
    monkeypatch.chdir(tmp_path)
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
    for name in ("lab", "other"):
        (tmp_path / f"config/llmctl/clusters/{name}.yaml").write_text(json.dumps(profile))
    return tmp_path


def add_run(folder, name, config=None):
    """A run of cluster lab, in the index and on the disk; returns its directory."""
    run_dir = folder / "runs" / f"{name}-1"
    run_dir.mkdir(parents=True)
    record = RunRecord(f"{name}-1", name, 1.0, "1", "lab", run_dir, ("llmctl",), {}, config, {}, {})
    environment = {"XDG_STATE_HOME": str(folder / "state"), "HOME": str(folder)}
    from llmctl.transport.local import LocalTransport

    record.save(LocalTransport(environment))
    RunIndex(UserFolders.from_environment(environment).state).add(record)
    return run_dir


def started_with(folder):
    return (folder / "argv").read_text().splitlines()


@pytest.mark.parametrize(
    "words",
    [
        ["import", "a b", "--output", "c"],
        ["export", "./a", "--output", "c", "--max-shard-bytes", "5", "--no-verify"],
        ["export", "--output=c", "./a"],
        ["show", "a/iter_0000005"],
        ["verify", "./a", "--against", "b"],
    ],
)
def test_flags_reach_the_trainer(login_node, monkeypatch, words):
    monkeypatch.setenv("STATUS", "3")
    assert main(["checkpoint", *words, "--cluster", "lab"]) == 3
    assert started_with(login_node) == ["-m", "trainer", "checkpoint", *words]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["import", "a"], "llmctl checkpoint import: the following arguments are required: --output"),
        (["export", "a", "--output", "b", "--shard", "5"], "llmctl checkpoint export: unrecognized arguments: --shard"),
        (
            ["export", "a", "--output", "b", "--max-shard-bytes", "5G"],
            "llmctl checkpoint export: argument --max-shard-",
        ),
        (["show"], "llmctl checkpoint show: the following arguments are required: CKPT|HF_DIR"),
    ],
)
def test_wrong_flags_are_an_error_and_start_nothing(login_node, capsys, words, says):
    assert main(["checkpoint", *words, "--cluster", "lab"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(says) and message.count("\n") == 1
    assert not (login_node / "argv").exists()


@pytest.mark.parametrize("command", ["import", "export", "show", "verify"])
def test_help_shows_the_flags_of_the_trainer(capsys, command):
    assert main(["checkpoint", command, "--help"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"usage: llmctl checkpoint {command} ")
    assert "--cluster NAME" in output


def test_a_run_is_its_directory_on_its_own_cluster(login_node):
    run_dir = add_run(login_node, "mine", {"checkpoint": {"save": None}})
    for reference in ("mine", "mine-1"):
        assert main(["checkpoint", "export", "--output", reference, reference]) == 0
        expected = ["export", "--output", reference, str(run_dir)]
        assert started_with(login_node) == ["-m", "trainer", "checkpoint", *expected]


def test_a_run_that_saves_elsewhere_is_that_folder(login_node):
    add_run(login_node, "mine", {"checkpoint": {"save": "/scratch/mine"}})
    assert main(["checkpoint", "show", "mine"]) == 0
    assert started_with(login_node) == ["-m", "trainer", "checkpoint", "show", "/scratch/mine"]


def test_a_folder_here_comes_before_a_run_of_its_name(login_node):
    add_run(login_node, "mine")
    (login_node / "mine").mkdir()
    assert main(["checkpoint", "show", "mine", "--cluster", "lab"]) == 0
    assert started_with(login_node)[-1] == "mine"


def test_neither_path_nor_run_is_an_error(login_node, capsys):
    add_run(login_node, "mine")
    assert main(["checkpoint", "show", "yours", "--cluster", "lab"]) == 5
    assert capsys.readouterr().err.startswith("llmctl: no run is called 'yours'")
    assert main(["checkpoint", "show", "mine", "--cluster", "other"]) == 2
    assert "run mine is on lab" in capsys.readouterr().err
    assert not (login_node / "argv").exists()


def test_the_local_cluster_runs_the_command_here(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("LLMCTL_RUNS_ROOT", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", "import", "nothing", "--output", "made"]) == 3
    assert capfd.readouterr().err.startswith("llmctl checkpoint import: nothing: is not a folder")

"""Submitting to a cluster whose login node is another machine: whose home, whose paths, whose Python.

The login node is this machine with another home directory (``OtherMachine``); tests/schedulers has real ones.
"""

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from llmctl.context import Context
from llmctl.errors import ConfigFileError, LlmctlError, ProfileError, RecordError, SchedulerError, UsageError
from llmctl.runs.record import RunRecord
from llmctl.submit.environment_checks import check_torch
from llmctl.submit.execute import execute_plan
from llmctl.submit.plan import Request, plan_submission
from llmctl.transport.local import LocalTransport
from tests.llmctl.submit.test_queue_submit import CONFIG, PROFILE, SBATCH, SQUEUE

HOST = "login.example"


@dataclass(frozen=True)
class OtherMachine(LocalTransport):
    """Fake hands: as if this machine were reached over the network, with a home of its own."""

    there: str = ""
    host = HOST
    is_remote = True

    def home(self) -> str:
        return self.there


class NoMachine:
    """Fake hands of a machine that nobody may touch."""

    is_remote = True
    host = HOST

    def home(self) -> str:
        raise AssertionError("home was asked for")

    def look_at(self, paths: list[str]) -> None:
        raise AssertionError(f"look_at was asked for {len(paths)} paths")


@pytest.fixture
def context(tmp_path, monkeypatch):
    """A laptop with the cluster ``far``; ``there`` is the home on its login node, where sbatch is a stand-in."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here / ".config/llmctl/clusters", there / "bin", there / "venv/bin"):
        folder.mkdir(parents=True)
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        write_program(there / "bin" / name, text)
    (there / "bin/taken").touch()
    write_python(there, "3.11.4 2.5.1+cu124 12.4")
    write_profile(here)
    (here / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    monkeypatch.chdir(here)
    environment = {"HOME": str(here), "LLMCTL_GROUP": "g1", "PATH": os.environ["PATH"], "TOKEN": "s3cret"}
    made = Context.of(("llmctl", "submit"), (), environment, here)
    made.connections["far"] = OtherMachine({"PATH": f"{there}/bin:/usr/bin:/bin"}, str(there))
    return made


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def write_python(there: Path, versions: str, status: int = 0) -> None:
    """A stand-in for the environment's Python, which answers the question for torch."""
    write_program(there / "venv/bin/python", f"#!/bin/bash\necho '{versions}'\nexit {status}\n")
    (there / "venv/bin/activate").write_text("")


def write_profile(here: Path, **changes: object) -> None:
    values = {
        **PROFILE,
        "runs_root": "~/runs",
        "login": {"host": HOST},
        "environment": {"kind": "venv", "path": "~/venv"},
        **changes,
    }
    (here / ".config/llmctl/clusters/far.yaml").write_text(yaml.safe_dump(values))


def plan(context: Context, *settings: str, **more):
    settings = ("training.device=cpu", *settings) if not more.get("command") else settings
    return plan_submission(context, Request("c.yaml", ("far", "--cluster"), settings=settings, run_id="r", **more))


def test_a_run_is_written_and_submitted_on_the_other_machine(context, tmp_path):
    there, said = tmp_path / "there", []
    (there / "data").mkdir()
    for end in ("bin", "idx"):
        (there / f"data/t.{end}").touch()
    record = execute_plan(
        plan(context, "data.mock_data=false", "data.data_path=[~/data/t]", secrets=("TOKEN",)),
        context,
        said.append,
    )
    assert record.run_dir == there / "runs/r"
    assert said == [f"{HOST}: python 3.11.4, torch 2.5.1+cu124 for GPUs (12.4)"]
    assert RunRecord.load(record.run_dir, context.connections["far"]).submissions == record.submissions
    assert record.cwd is None
    assert (there / "runs/r/code/trainer/__init__.py").is_file()
    config = yaml.safe_load((there / "runs/r/config.yaml").read_text())
    assert config["data"]["data_path"] == [f"{there}/data/t"]
    secret = there / "runs/.secrets/r.1"
    assert (secret.read_bytes(), stat.S_IMODE(secret.stat().st_mode)) == (b"TOKEN\0s3cret\0", 0o600)
    assert stat.S_IMODE(secret.parent.stat().st_mode) == 0o700
    assert json.loads((there / "runs/r/job.json").read_text())["secrets_file"] == str(secret)
    everything = [path for path in (there / "runs/r").rglob("*") if path.is_file() and path.name != "activate"]
    assert not [path for path in everything if b"s3cret" in path.read_bytes()]
    assert f"{there}/venv/bin/python" in (there / "runs/r/job.sh").read_text()
    assert [entry.job_ids for entry in context.index.entries()] == [("100",)]
    assert not (tmp_path / "here/runs").exists()


def test_a_refusal_there_leaves_nothing_there_and_nothing_here(context, tmp_path):
    (tmp_path / "there/bin/mood").write_text("refused\n")
    with pytest.raises(LlmctlError, match="Invalid account"):
        execute_plan(plan(context, secrets=("TOKEN",)), context, lambda _: None)
    assert sorted(path.name for path in (tmp_path / "there/runs").iterdir()) == [".code", ".secrets"]
    assert list((tmp_path / "there/runs/.secrets").iterdir()) == []
    assert context.index.entries() == []


def test_paths_are_the_other_machines(context, tmp_path):
    (tmp_path / "here/t.json").touch()
    with pytest.raises(UsageError, match=r"--set data.tokenizer_model: t.json is relative.*beginning with / or ~/"):
        plan(context, "data.tokenizer_model=t.json")
    with pytest.raises(UsageError, match=f"there is no {tmp_path}/there/t.json"):
        plan(context, "data.tokenizer_model=~/t.json")
    (tmp_path / "there/t.json").touch()
    assert plan(context, "data.tokenizer_model=~/t.json").record.config["data"]["tokenizer_model"].endswith("t.json")


def test_a_dry_run_touches_the_other_machine_only_for_its_home(context, tmp_path):
    write_profile(tmp_path / "here", runs_root="/work/runs", environment={"kind": "venv", "path": "/work/venv"})
    context.connections["far"] = NoMachine()
    dry = plan(context, dry_run=True)
    assert "/work/runs/r" in dry.rendered.script
    assert dry.warnings == (f"not checked on {HOST}: /work/runs, /work/runs/r",)
    with pytest.raises(AssertionError, match="look_at was asked for"):
        plan(context)
    write_profile(tmp_path / "here")
    with pytest.raises(AssertionError, match="home was asked for"):
        plan(context, dry_run=True)


def test_our_own_python_means_nothing_there(context, tmp_path):
    write_profile(tmp_path / "here", environment={})
    with pytest.raises(ProfileError, match="llmctl cannot guess the Python of login.example for the job"):
        plan(context)
    command = plan(context, command=("hostname",))
    assert command.job.layout.working_dir == tmp_path / "there/runs/r"


@pytest.mark.parametrize(
    ("versions", "status", "words"),
    [
        ("3.11.4 2.5.1+cpu -", 0, "built for CPUs, and gpu has GPUs"),
        ("", 3, "has no torch, which the trainer needs"),
        ("", 1, "does not start"),
    ],
)
def test_torch_is_asked_for_before_the_queue(context, tmp_path, versions, status, words):
    write_python(tmp_path / "there", versions, status)
    made = plan_submission(
        context, Request("c.yaml", ("far", "--cluster"), settings=("training.device=cuda",), run_id="r")
    )
    with pytest.raises(ProfileError, match=words):
        execute_plan(made, context, lambda _: None)
    assert not (tmp_path / "there/runs").exists()


def test_a_torch_for_cpus_will_do_on_cpus(context, tmp_path):
    write_python(tmp_path / "there", "3.11.4 2.5.1+cpu -")
    made = plan(context)
    transport = context.connections["far"]
    found = check_torch(made.job.profile, context, transport, made.job.layout.python, made.job.request)
    assert str(found) == "python 3.11.4, torch 2.5.1+cpu for CPUs"


def test_a_config_without_data_says_what_to_give(context):
    with pytest.raises((UsageError, ConfigFileError), match="data.data_path"):
        plan(context, "data.mock_data=false")


@dataclass(frozen=True)
class LosesRecords(OtherMachine):
    """Fake hands: the connection drops with every record that holds a job."""

    def write_files(self, files):
        if any(file.path.endswith("run.json") and b'"job_id"' in file.data for file in files):
            raise SchedulerError(f"{HOST}: the connection was lost", transient=True)
        LocalTransport.write_files(files)


def test_a_job_whose_record_could_not_be_written_is_said_to_be_submitted(context, tmp_path):
    there = tmp_path / "there"
    context.connections["far"] = LosesRecords({"PATH": f"{there}/bin:/usr/bin:/bin"}, str(there))
    with pytest.raises(RecordError, match="r was submitted as job 100, but its record could not be written"):
        execute_plan(plan(context), context, lambda _: None)
    assert RunRecord.load(there / "runs/r", context.connections["far"]).submissions[0].jobs == ()
    assert [entry.job_ids for entry in context.index.entries()] == [("100",)]

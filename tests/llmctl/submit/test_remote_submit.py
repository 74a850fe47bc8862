"""Submitting to a login node with another home, other paths and another Python.

The login node is this machine with another home directory (``OtherMachine``); tests/schedulers has real ones.
"""

import json
import os
import shutil
import stat
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from llmctl.context import Context
from llmctl.errors import ConfigFileError, LlmctlError, ProfileError, RecordError, SchedulerError, UsageError
from llmctl.runs.record import RunRecord
from llmctl.submit.checks.torch_check import check_torch
from llmctl.submit.execute import execute_plan
from llmctl.submit.job import SubmitArguments
from llmctl.submit.plan import plan_submission
from llmctl.transport.local import LocalTransport
from tests.llmctl.submit.test_queue_submit import CONFIG, PROFILE, SBATCH, SQUEUE
from tests.trainer.data import token_files

OWN = f".llmctl-{os.geteuid()}"

HOST = "login.example"


@dataclass(frozen=True)
class OtherMachine(LocalTransport):
    """Fake transport: this machine as a remote machine with another home directory."""

    there: str = ""
    host = HOST
    is_remote = True

    def home(self) -> str:
        return self.there


class NoMachine:
    """Fake transport to a machine that must not be accessed."""

    is_remote = True
    host = HOST

    def home(self) -> str:
        raise AssertionError("home was asked for")

    def read_bad_nodes(self, runs_root: str) -> None:
        raise AssertionError(f"the list of bad nodes in {runs_root} was asked for")


@pytest.fixture
def context(tmp_path, monkeypatch):
    """A laptop with the cluster ``far``; ``there`` is the home on its login node."""
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
    """Stand-in for the environment's Python, which reports a version of torch and a digest."""
    write_program(there / "venv/bin/python", f"#!/bin/bash\necho '{versions} {'0' * 64}'\nexit {status}\n")
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
    return plan_submission(context, SubmitArguments("c.yaml", "far", settings=settings, **{"run_id": "r", **more}))


def test_a_run_is_written_and_submitted_on_the_other_machine(context, tmp_path):
    there, printed = tmp_path / "there", []
    (there / "data").mkdir()
    token_files.write(there / "data/t", [[1] * 5000])
    record = execute_plan(
        plan(context, "data.mock_data=false", "data.data_path=[~/data/t]", secrets=("TOKEN",)),
        replace(context, tell=printed.append),
    )
    assert record.run_dir == there / "runs/r"
    assert printed == [f"{HOST}: python 3.11.4, torch 2.5.1+cu124 for GPUs (12.4)"]
    assert RunRecord.load(record.run_dir, context.connections["far"]).submissions == record.submissions
    assert record.cwd is None
    assert (there / "runs/r/code/trainer/__init__.py").is_file()
    config = yaml.safe_load((there / "runs/r/config.yaml").read_text())
    assert config["data"]["data_path"] == [f"{there}/data/t"]
    secret = there / "runs/r/own/secrets/r.1"
    assert (secret.read_bytes(), stat.S_IMODE(secret.stat().st_mode)) == (b"TOKEN\0s3cret\0", 0o600)
    assert stat.S_IMODE(secret.parent.stat().st_mode) == 0o700
    modes = {name: stat.S_IMODE((there / "runs" / name).stat().st_mode) for name in ("r", "r/run.json", "r/job.sh")}
    assert modes == {"r": 0o700, "r/run.json": 0o600, "r/job.sh": 0o700}
    assert json.loads((there / "runs/r/job.json").read_text())["secrets_file"] == str(secret)
    everything = [path for path in (there / "runs/r").rglob("*") if path.is_file() and path.name != "activate"]
    assert not [path for path in everything if b"s3cret" in path.read_bytes()]
    assert f"{there}/venv/bin/python" in (there / "runs/r/job.sh").read_text()
    assert [entry.job_ids for entry in context.index.entries()] == [("100",)]
    assert not (tmp_path / "here/runs").exists()


def test_a_refused_remote_submit_leaves_nothing_on_either_machine(context, tmp_path):
    (tmp_path / "there/bin/outcome").write_text("refused\n")
    with pytest.raises(LlmctlError, match="Invalid account"):
        execute_plan(plan(context, secrets=("TOKEN",)), context)
    assert sorted(path.name for path in (tmp_path / "there/runs").iterdir()) == [OWN]
    assert list((tmp_path / f"there/runs/{OWN}/secrets").iterdir()) == []
    assert context.index.entries() == []


def test_secrets_of_a_run_whose_folder_is_gone_are_removed_at_the_next_submit(context, tmp_path):
    runs = tmp_path / "there/runs"
    for run_id in ("gone", "kept"):
        execute_plan(plan(context, run_id=run_id, secrets=("TOKEN",)), context)
    shutil.rmtree(runs / "gone")
    assert sorted(path.name for path in (runs / f"{OWN}/secrets").iterdir()) == ["gone.1", "kept.1"]
    execute_plan(plan(context, run_id="new", secrets=("TOKEN",)), context)
    assert sorted(path.name for path in (runs / f"{OWN}/secrets").iterdir()) == ["kept.1", "new.1"]


def test_paths_are_the_other_machines(context, tmp_path):
    (tmp_path / "here/t.json").touch()
    with pytest.raises(UsageError, match=r"--set data.tokenizer_model: t.json is relative.*beginning with / or ~/"):
        plan(context, "data.tokenizer_model=t.json")
    with pytest.raises(UsageError, match=f"there is no {tmp_path}/there/t.json"):
        plan(context, "data.tokenizer_model=~/t.json")
    (tmp_path / "there/t.json").write_text('{"model": {"vocab": {"a": 0}}}')
    assert plan(context, "data.tokenizer_model=~/t.json").record.config["data"]["tokenizer_model"].endswith("t.json")


def test_a_dry_run_asks_the_other_machine_nothing(context, tmp_path):
    write_profile(tmp_path / "here", runs_root="/work/runs", environment={"kind": "venv", "path": "/work/venv"})
    context.connections["far"] = NoMachine()
    dry = plan(context, dry_run=True)
    assert "/work/runs/r" in dry.rendered.script
    generated, unchecked = dry.warnings
    assert generated.startswith("data.mock_data: generated data has no tokenizer")
    assert unchecked == f"not checked on {HOST}: /work/runs, /work/runs/r"
    with pytest.raises(AssertionError, match="the list of bad nodes in /work/runs was asked for"):
        plan(context)
    write_profile(tmp_path / "here")
    with pytest.raises(AssertionError, match="home was asked for"):
        plan(context)
    dry = plan(context, dry_run=True)
    assert "/YOUR-HOME/" in dry.rendered.script
    assert any("YOUR-HOME (your home directory there" in warning for warning in dry.warnings)


def test_the_local_python_is_not_used_on_the_other_machine(context, tmp_path):
    write_profile(tmp_path / "here", environment={})
    with pytest.raises(ProfileError, match="llmctl cannot guess the Python of login.example for the job"):
        plan(context)
    command = plan(context, command=("hostname",))
    assert command.job.working_dir == tmp_path / "there/runs/r"


@pytest.mark.parametrize(
    ("versions", "status", "words"),
    [
        ("3.11.4 2.5.1+cpu -", 0, "built for CPUs, and gpu has GPUs"),
        ("", 3, "has no torch, which the trainer needs"),
        ("", 1, "does not start"),
    ],
)
def test_torch_is_checked_before_the_queue(context, tmp_path, versions, status, words):
    write_python(tmp_path / "there", versions, status)
    made = plan_submission(context, SubmitArguments("c.yaml", "far", settings=("training.device=cuda",), run_id="r"))
    with pytest.raises(ProfileError, match=words):
        execute_plan(made, context)
    assert not (tmp_path / "there/runs").exists()


def test_a_cpu_torch_is_accepted_on_cpus(context, tmp_path):
    write_python(tmp_path / "there", "3.11.4 2.5.1+cpu -")
    made = plan(context)
    transport = context.connections["far"]
    found = check_torch(made.job.profile, context, transport, made.job.python, made.job.request)
    assert str(found) == "python 3.11.4, torch 2.5.1+cpu for CPUs"


def test_a_config_without_data_is_refused_with_what_to_give(context):
    with pytest.raises((UsageError, ConfigFileError), match="data.data_path"):
        plan(context, "data.mock_data=false")


@dataclass(frozen=True)
class LosesRecords(OtherMachine):
    """Fake transport: the connection breaks at every write of a record with a job."""

    def write_files(self, files):
        if any(file.path.endswith("run.json") and b'"job_id"' in file.data for file in files):
            raise SchedulerError(f"{HOST}: the connection was lost", transient=True)
        LocalTransport.write_files(files)


def test_a_job_without_a_written_record_is_reported_as_submitted(context, tmp_path):
    there = tmp_path / "there"
    context.connections["far"] = LosesRecords({"PATH": f"{there}/bin:/usr/bin:/bin"}, str(there))
    with pytest.raises(RecordError, match="r was submitted as job 100, but its record could not be written"):
        execute_plan(plan(context), context)
    assert RunRecord.load(there / "runs/r", context.connections["far"]).submissions[0].jobs == ()
    # As written before the job was started.
    assert stat.S_IMODE((there / "runs/r/run.json").stat().st_mode) == 0o600
    assert [entry.job_ids for entry in context.index.entries()] == [("100",)]


FOREIGN = {
    "torch": (
        ["iter_0000100/mp_rank_00/model_optim_rng.pt"],
        "holds a checkpoint of Megatron-LM in the format torch, ",
    ),
    "torch_dist": (["iter_0000100/.metadata", "iter_0000100/__0_0.distcp"], "in the format torch_dist"),
    "zarr": (["iter_0000100/common.pt", "iter_0000100/decoder.weight/.zarray"], "in the format zarr"),
    "one iteration": ([".metadata", "__0_0.distcp", "common.pt"], "in the format torch_dist"),
    "Hugging Face": (["config.json", "pytorch_model.bin"], ""),
    "of this trainer": (["iter_0000100/metadata.json", "iter_0000100/model_rank00000.safetensors"], ""),
}


SHAPE = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
PUBLISHED = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_checkpoint_of_another_program_is_named_before_the_queue(context, tmp_path, name):
    files, words = FOREIGN[name]
    for file in files:
        path = tmp_path / "there/start" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        own = {"config": {"model": SHAPE}, "vocab_size": 100} if name == "of this trainer" else {}
        path.write_text(json.dumps(PUBLISHED | own))
    if not words:
        # The section model of the config is that of the checkpoint of this trainer.
        plan(context, "checkpoint.load=~/start", *(["model=null"] if name == "Hugging Face" else []))
    else:
        with pytest.raises(UsageError, match=f"^--set checkpoint.load: {tmp_path}/there/start .*{words}") as caught:
            plan(context, "checkpoint.load=~/start")
        assert "llmctl checkpoint import" in str(caught.value)
        assert "damaged" not in str(caught.value)
    if name == "of this trainer":
        plan(context, "checkpoint.save=~/start")
        return
    with pytest.raises(
        UsageError, match=f"^--set checkpoint.save: {tmp_path}/there/start is a .*a folder of their own"
    ):
        plan(context, "checkpoint.save=~/start")

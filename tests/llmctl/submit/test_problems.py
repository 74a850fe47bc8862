"""All problems of a job, reported at once, each with its flag, file or profile."""

from pathlib import Path

import pytest
import yaml

from llmctl.cli.main import main
from llmctl.context import Context
from llmctl.errors import ConfigFileError, ProfileError, RecordError, UsageError
from llmctl.site.profile import ClusterProfile
from llmctl.submit.job import Problem
from llmctl.submit.origins import Origin, ProfileOrigins, Resolved

CONFIG = {
    "job": {"nodes": 20},
    "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4},
    "training": {"train_iters": 10, "seq_length": 64, "micro_batch_size": 1, "device": "cpu"},
    "optimizer": {"lr": 1e-3},
}
PROFILE = {
    "scheduler": "slurm",
    "group_required": True,
    "resource_types": {"gpu": {"gpus": 8, "max_nodes": 16}},
    "defaults": {"resource_type": "gpu", "time": "9:00:00"},
    "limits": {"max_time": "8:00:00"},
}


@pytest.fixture
def place(own_folders):
    """A home with the cluster ``bed``; the working directory has ``c.yaml``."""
    path = own_folders / "config/llmctl/clusters/bed.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(yaml.safe_dump({**PROFILE, "runs_root": f"{own_folders}/runs"}))
    (own_folders / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    return own_folders


def refused(capsys, *arguments, code):
    assert main(["submit", "--cluster", "bed", *arguments]) == code
    return capsys.readouterr().err.splitlines()


def test_every_problem_is_reported_with_its_origin(place, capsys, monkeypatch):
    monkeypatch.delenv("TOKEN", raising=False)
    messages = refused(capsys, "c.yaml", "--priority", "5", "--launcher", "mpirun", "--secret", "TOKEN", code=3)
    profile = f"{place}/config/llmctl/clusters/bed.yaml"
    assert messages[0].startswith("llmctl: cluster bed: group: is unset, and bed needs a group")
    assert messages[1].startswith("give --group G, or set LLMCTL_GROUP")
    assert [line.partition(": ")[0] for line in messages[2:]] == ["also"] * (len(messages) - 2)
    assert [line.removeprefix("also: ").split(",")[0] for line in messages[2:]] == [
        "--priority: 5 is above 0",
        f"{place}/c.yaml: job.nodes: 20 nodes are above 16",
        "cluster bed: defaults.time: 9:00:00 is above 8:00:00",
        "--secret TOKEN: is not set in your environment; export the variable first",
        f"{place}/c.yaml: data.data_path: is unset: give the prefix of an indexed dataset",
    ]
    assert f"(set in {profile})" in messages[4]


def test_path_problems_are_reported_with_the_others(place, capsys):
    config = {**CONFIG, "job": {}, "data": {"data_path": ["text"]}, "checkpoint": {"load": "gone"}}
    (place / "c.yaml").write_text(yaml.safe_dump(config))
    assert refused(capsys, "c.yaml", "--group", "g", "--time", "9:30:00", code=2) == [
        "llmctl: --time: 9:30:00 is above 8:00:00, the longest time of bed",
        f"also: {place}/c.yaml: data.data_path: there is no {place}/text.bin; name the prefix of an indexed dataset, "
        "which `llmctl data prepare` makes from text",
        f"also: {place}/c.yaml: checkpoint.load: there is no {place}/gone; correct the path, or unset the key "
        "(checkpoint.load=null) to start with new weights, as Megatron-LM would without --exit-on-missing-checkpoint",
    ]


@pytest.mark.usefixtures("place")
def test_every_bad_key_of_a_command_is_reported(capsys):
    arguments = ["--set", "job.nodes=0", "--set", "job.que=x", "--", "true"]
    first, second = refused(capsys, *arguments, code=2)
    assert first.startswith("llmctl: --set job.que: ") and "job.queue" in first
    assert second.startswith("also: --set job.nodes: 0 is not valid")


@pytest.mark.usefixtures("place")
def test_a_problem_of_a_default_names_the_profile_and_the_flag_that_caused_it(capsys):
    (message,) = refused(capsys, "--group", "g", "--", "true", code=3)
    assert message.startswith("llmctl: cluster bed: defaults.time: 9:00:00 is above 8:00:00")
    (message,) = refused(capsys, "--group", "g", "--nodes", "2", "--", "true", code=2)
    assert message.startswith("llmctl: --nodes: cluster bed: defaults.time: 9:00:00 is above 8:00:00")


def resolved() -> Resolved:
    environment = {"HOME": "/home/ada", "LLMCTL_RUNS_ROOT": "/scratch"}
    context = Context.of((), (), environment, Path("/"))
    origins = {"job.nodes": Origin("--nodes", is_flag=True), "job.time": Origin("c.yaml")}
    profile = ClusterProfile(name="slurm", scheduler="slurm")
    return Resolved({}, origins, "c.yaml", ProfileOrigins(context, profile))


@pytest.mark.parametrize(
    ("problem", "kind", "message"),
    [
        (Problem("job.nodes", "is wrong"), UsageError, "--nodes: is wrong"),
        (Problem("job.time", "is wrong"), ConfigFileError, "c.yaml: job.time: is wrong"),
        (Problem("job.time", "is wrong", also=("job.nodes",)), UsageError, "--nodes: c.yaml: job.time: is wrong"),
        (Problem("job.queue", "is wrong"), ConfigFileError, "c.yaml: job.queue: is wrong"),
        (Problem("--run-id r", "is wrong", of="flag"), UsageError, "--run-id r: is wrong"),
        (Problem("hosts", "is wrong", of="profile"), ProfileError, "cluster slurm: hosts: is wrong"),
        (Problem("runs_root", "is wrong", of="profile"), ProfileError, "LLMCTL_RUNS_ROOT: is wrong"),
        (Problem("", "is gone", of="run"), RecordError, "is gone"),
    ],
)
def test_an_error_names_the_origin(problem, kind, message):
    error = resolved().error([problem])
    assert (type(error), error.message) == (kind, message)


def test_the_first_problem_is_the_error_and_no_problem_is_repeated():
    first, second = Problem("job.time", "is wrong"), Problem("job.nodes", "is wrong\ndo this")
    error = resolved().error([first, second, first, second])
    assert isinstance(error, ConfigFileError)
    assert error.message == "c.yaml: job.time: is wrong\nalso: --nodes: is wrong; do this"

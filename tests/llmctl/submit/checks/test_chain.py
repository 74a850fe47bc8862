"""Limits of a chain of jobs: as they are given, and as the cluster allows."""

import json
import subprocess

import pytest
import yaml
from pydantic import ValidationError

from llmctl.backends import load_queue_backend
from llmctl.backends.base import JobRequest
from llmctl.cli.main import main
from llmctl.site.job import JobSpec
from llmctl.site.profile import ClusterProfile
from llmctl.supervisor.settings import JobSettings
from trainer.config.sections.job import JobConfig

CONFIG = {
    "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2},
    "training": {"train_iters": 12, "seq_length": 32, "micro_batch_size": 1, "global_batch_size": 8},
    "optimizer": {"lr": 1e-3},
    "data": {"mock_data": True},
}
ON_ABCI = ("--cluster", "abci", "--group", "gaa50001", "--resource-type", "rt_F")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("until=500", {"until": 500}),
        (" until = 500 , points=1.5,node_hours=16", {"until": 500, "points": 1.5, "node_hours": 16}),
        ({"points": 40, "until": None}, {"points": 40}),
        (None, None),
    ],
)
def test_the_limits_of_a_chain(given, expected):
    found = JobConfig(chain=given).chain
    assert found == expected
    spec = JobSpec.from_plain({"name": "r", "chain": found})
    assert JobSpec.from_plain(json.loads(json.dumps(spec.as_plain()))) == spec


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "give at least one of until, points, node_hours"),
        ({}, "give at least one of until, points, node_hours"),
        (
            "until=x,points=-1,hours=3",
            "until is 'x', give an iteration from 1 on; points is '-1', give a number above 0; "
            "hours is unknown, the keys are until, points, node_hours",
        ),
        ("until=1.5", "until is '1.5', give an iteration from 1 on"),
        ("node_hours=inf", "node_hours is 'inf', give a number above 0"),
        ({"until": True}, "until is True, give an iteration from 1 on"),
        ("500", "500 is unknown"),
    ],
)
def test_limits_that_are_not_valid(given, words):
    with pytest.raises(ValidationError) as error:
        JobConfig(chain=given)
    (found,) = error.value.errors(include_url=False)
    assert words in found["msg"] and found["loc"] == ("chain",)


@pytest.fixture
def plan(home, capsys):
    """Plan a run without submitting it; returns the exit code and what llmctl says."""
    (home / "c.yaml").write_text(yaml.safe_dump(CONFIG))

    def call(*arguments: str) -> tuple[int, str]:
        code = main(["submit", "--dry-run", *arguments])
        found = capsys.readouterr()
        return code, found.out + found.err

    return call


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("c.yaml", "--cluster", "local", "--chain", "until=5"),
            "--chain: is not possible on local, which has no queue for a next job: give --max-restarts N instead",
        ),
        (("c.yaml", *ON_ABCI, "--chain", "until=x,points=-1"), "until is 'x', give an iteration from 1 on; points is"),
        (("c.yaml", "--cluster", "slurm", "--chain", "points=5", "--time", "1h"), "--chain: points cannot be counted"),
        (("c.yaml", *ON_ABCI, "--chain", "until=13"), "until 13 is above training.train_iters 12; lower it"),
        ((*ON_ABCI, "--chain", "until=5", "--", "true"), "until counts iterations, which a COMMAND does not have"),
        (("c.yaml", "--cluster", "slurm", "--chain", "node_hours=5"), "needs the time limit of a job"),
        (("c.yaml", *ON_ABCI, "--chain", "until=5", "--after", "x"), "does not go with --after"),
    ],
)
def test_a_chain_that_the_cluster_does_not_allow(plan, arguments, words):
    code, said = plan(*arguments)
    assert code in (2, 3) and words in said, said


def test_a_chain_that_is_allowed(plan):
    code, said = plan("c.yaml", *ON_ABCI, "--time", "1h", "--chain", "points=40,until=12")
    assert code == 0, said


def test_grid_engine_submits_the_next_job_where_qsub_is_not_in_the_path(tmp_path):
    folder = tmp_path / "root/bin/lx"
    folder.mkdir(parents=True)
    (folder / "qsub").write_text('#!/bin/sh\necho "$@"\n')
    (folder / "qsub").chmod(0o755)
    backend = load_queue_backend("sge")
    assert backend is not None
    request = JobRequest(ClusterProfile(name="x", scheduler="sge"), "r", str(tmp_path), group="g1")
    # This machine may have a qsub of its own.
    (tmp_path / "sh").symlink_to("/bin/sh")
    environ = {"PATH": str(tmp_path), "SGE_ROOT": f"{tmp_path}/root", "ARC": "lx"}
    done = subprocess.run(backend.next_job_argv(request), env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "-g g1 job.sh\n"


def test_slurm_submits_the_next_job_as_llmctl_does(tmp_path):
    backend = load_queue_backend("slurm")
    assert backend is not None
    request = JobRequest(ClusterProfile(name="x", scheduler="slurm"), "r", str(tmp_path))
    assert backend.next_job_argv(request) == backend.submit_commands(request)[0].argv


def test_a_chain_in_the_files_of_a_run_and_after_a_resume(own_folders, monkeypatch, capsys):
    monkeypatch.setenv("PATH", f"{own_folders}/bin:/usr/bin:/bin")
    (own_folders / "bin").mkdir()
    for name, text in {"sbatch": "echo 7", "squeue": "true", "sacct": "true"}.items():
        (own_folders / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (own_folders / "bin" / name).chmod(0o755)
    clusters = own_folders / "config/llmctl/clusters"
    clusters.mkdir(parents=True)
    (clusters / "bed.yaml").write_text(yaml.safe_dump({"scheduler": "slurm", "runs_root": f"{own_folders}/runs"}))
    limits = ("--time", "10m", "--chain", "node_hours=1")
    assert main(["submit", "--cluster", "bed", "--run-id", "r", *limits, "--", "true"]) == 0
    run_dir = own_folders / "runs/r"
    chain = JobSettings.read(str(run_dir / "job.json")).chain
    assert chain is not None and (chain.time_s, chain.until, chain.points, chain.node_hours) == (600, 0, None, 1)
    assert chain.argv[-4:-2] == ("sbatch", "--parsable") and chain.argv[-1] == "job.sh"
    attempt = run_dir / "attempts/1"
    attempt.mkdir(parents=True)
    (attempt / "started.json").write_text(json.dumps({"submission": 1, "job_id": "7", "link": 1}))
    end = {"code": 0, "reason": "timeout", "signal": "USR1", "not_chained": "job.chain.node_hours is 1"}
    (attempt / "exit.json").write_text(json.dumps(end))
    capsys.readouterr()
    assert main(["resume", "r", "--set", "job.chain=node_hours=4"]) == 0, capsys.readouterr().err
    again = JobSettings.read(str(run_dir / "job.json"))
    assert again.submission == 2 and again.chain == chain._replace(node_hours=4)
    assert json.loads((run_dir / "run.json").read_text())["job"]["chain"] == {"node_hours": 4}

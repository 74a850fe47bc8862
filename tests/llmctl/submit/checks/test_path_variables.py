"""``$SCRATCH`` in paths of a config and of a profile, on this machine and on a login node."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from llmctl.cli.main import main
from llmctl.errors import ConfigFileError, ProfileError, UsageError
from llmctl.submit.job import SubmitArguments
from llmctl.submit.plan import plan_submission
from tests.llmctl.submit.test_config_file import CONFIG
from tests.llmctl.submit.test_remote_submit import HOST, context, plan, write_profile

__all__ = ["context"]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An empty home with a config that saves below $SCRATCH."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**CONFIG, "checkpoint": {"save": "$SCRATCH/ck"}}))
    return {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""}


def test_an_unset_variable_is_refused_before_anything_is_written(environment, capsys, tmp_path):
    before = sorted(tmp_path.iterdir())
    assert main(["submit", "c.yaml"], environment) == 3
    problem = "checkpoint.save: $SCRATCH is not set on this machine; export it there, or give the path itself"
    assert capsys.readouterr().err == f"llmctl: {tmp_path}/c.yaml: {problem}\n"
    assert main(["submit", "c.yaml", "--set", "data.data_path=$A:$B"], environment) == 3
    assert capsys.readouterr().err.splitlines()[1].startswith("also: --set data.data_path: $A and $B are not set on")
    assert sorted(tmp_path.iterdir()) == before


def test_a_flag_takes_the_place_of_an_unset_variable(environment, capsys):
    assert main(["submit", "c.yaml", "--set", "checkpoint.save=/ck", "--show-script"], environment) == 0
    assert "SCRATCH" not in capsys.readouterr().err


def test_the_script_has_the_path_and_not_the_variable(environment, capsys, tmp_path):
    place = tmp_path / "it's"
    place.mkdir()
    (place / "i.sif").touch()
    command = ["submit", "c.yaml", "--container", "$SCRATCH/i.sif", "--mount", "${SCRATCH}/a:/data", "--show-script"]
    assert main([*command, "--cluster", "abci", "--group", "g1"], {**environment, "SCRATCH": str(place)}) == 0
    shown = capsys.readouterr()
    assert "SCRATCH}" not in shown.out and "$SCRATCH" not in shown.out
    assert all(shlex.quote(path) in shown.out for path in (f"{place}/i.sif", f"{place}/a:/data"))


def test_runs_root_and_the_environment_of_a_profile(environment, capsys, tmp_path):
    overlay = tmp_path / ".config/llmctl/clusters/local.yaml"
    overlay.parent.mkdir(parents=True)
    overlay.write_text("runs_root: $SCRATCH/runs\n")
    command = ["submit", "c.yaml", "--set", "checkpoint.save=null", "--dry-run"]
    assert main(command, {**environment, "SCRATCH": f"{tmp_path}/s"}) == 0
    assert f"{tmp_path}/s/runs/c-" in capsys.readouterr().out
    assert main(command, environment) == 3
    assert f"{overlay}: runs_root: $SCRATCH is not set on this machine" in capsys.readouterr().err
    overlay.write_text("runs_root: ~/runs\nenvironment: {kind: venv, path: $SCRATCH/venv}\n")
    assert main(command, environment) == 3
    assert "cluster local: environment.path: $SCRATCH is not set on this machine" in capsys.readouterr().err


def with_variables_there(context, **variables: str) -> None:
    there: Mapping[str, str] = context.connections["far"].environment
    there.update(variables)  # type: ignore[attr-defined]


def test_paths_on_a_login_node_have_the_variables_of_that_machine(context, tmp_path):
    context.environment["SCRATCH"] = "/of/the/laptop"
    with pytest.raises(UsageError, match=rf"checkpoint.save: \$SCRATCH is not set on {HOST}; export it there"):
        plan(context, "checkpoint.save=$SCRATCH/ck")
    with_variables_there(context, SCRATCH=str(tmp_path / "there/s"))
    made = plan(context, "checkpoint.save=$SCRATCH/ck")
    assert made.record.config["checkpoint"]["save"] == f"{tmp_path}/there/s/ck"
    write_profile(Path(context.environment["HOME"]), runs_root="$SCRATCH/runs")
    assert plan(context).record.run_dir == tmp_path / "there/s/runs/r"


def test_a_dry_run_asks_another_machine_for_no_variable(context):
    made = plan(context, "checkpoint.save=$SCRATCH/ck", dry_run=True)
    assert made.record.config["checkpoint"]["save"] == "/YOUR-SCRATCH/ck"
    assert any("YOUR-SCRATCH ($SCRATCH there" in warning for warning in made.warnings)


def test_code_is_read_here(context):
    with pytest.raises(UsageError, match=r"job.code: \$CODE is not set on this machine"):
        plan(context, "job.code=[$CODE]")


def test_a_variable_in_the_file_is_blamed_on_the_file(context):
    path = Path(context.environment["HOME"]) / "c.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "checkpoint": {"load": "${WORK}/x"}}))
    with pytest.raises(ConfigFileError, match=rf"c.yaml: checkpoint.load: \$WORK is not set on {HOST}"):
        plan(context)


def test_a_secret_becomes_no_path(context):
    with_variables_there(context, HF_TOKEN="s3cret")
    with pytest.raises(UsageError, match=r"\$HF_TOKEN may be a secret") as caught:
        plan(context, "checkpoint.save=/x/$HF_TOKEN")
    assert "s3cret" not in str(caught.value)
    write_profile(Path(context.environment["HOME"]), runs_root="/x/$HF_TOKEN")
    with pytest.raises(ProfileError, match=r"runs_root: \$HF_TOKEN may be a secret"):
        plan(context)


def test_variables_of_the_job_stay_and_are_told(environment, capsys):
    command = [
        "submit",
        "c.yaml",
        "--set",
        "checkpoint.save=null",
        "--set",
        "job.env={A: $SCRATCH/hf}",
        "--show-script",
    ]
    assert main(command, {**environment, "SCRATCH": "/scratch"}) == 0
    shown = capsys.readouterr()
    assert "job.env.A: $SCRATCH is passed on as it stands; only paths of the config have variables" in shown.err
    assert "'$SCRATCH/hf'" in shown.out


def test_a_path_of_a_script_is_that_of_the_cluster(context, tmp_path):
    script = Path(context.environment["HOME"]) / "t.sh"
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    more = "--micro-batch-size 1 --lr 1e-3 --train-iters $ITERS --vocab-size 128 --mock-data --save $SCRATCH/ck"
    script.write_text(f"torchrun --nproc_per_node 1 pretrain_gpt.py {flags} {more}\n")
    context.environment.update(SCRATCH="/of/the/laptop", ITERS="7")
    with_variables_there(context, SCRATCH=str(tmp_path / "there/s"), ITERS="9")
    made = plan_submission(context, SubmitArguments("t.sh", "far", settings=("training.device=cpu",), run_id="r"))
    assert made.record.config["checkpoint"]["save"] == f"{tmp_path}/there/s/ck"
    assert made.record.config["training"]["train_iters"] == 7
    assert any("$ITERS: has the value of the environment" in warning for warning in made.warnings)

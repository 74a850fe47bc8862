"""Requests to Slurm: ignored variables, refused clusters, and cores of steps."""

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from llmctl.backends.base import JobRequest
from llmctl.backends.slurm.backend import SlurmBackend
from llmctl.cli.main import main
from llmctl.context import Context
from llmctl.operate.attach import AttachedJob, Attachment
from llmctl.operate.interactive import attach_session
from llmctl.site.job import JobSpec
from llmctl.site.profile import ClusterProfile
from llmctl.submit.decide import build_request
from tests.llmctl.backends.test_slurm import stand_ins
from tests.llmctl.run_directories import make_run
from tests.llmctl.scripts.script_cases import render_case
from tests.waiting import HANG_S

Refused = Callable[[dict[str, object]], str]
BACKEND = SlurmBackend()
REQUEST = JobRequest(ClusterProfile(name="s", scheduler="slurm"), job_name="x-1", run_dir="/runs/x-1")
MEDDLING = {
    "SBATCH_PARTITION": "mine",
    "SBATCH_JOB_NAME": "mine",
    "SALLOC_ACCOUNT": "mine",
    "SRUN_CPUS_PER_TASK": "1",
    "SQUEUE_PARTITION": "none",
    "SACCT_FORMAT": "User",
    "SCANCEL_STATE": "PENDING",
    "SCONTROL_FUTURE": "1",
    "SLURM_TIME_FORMAT": "relative",
    "SLURM_CLUSTERS": "other",
    "SLURM_MEM_PER_CPU": "\udcff x",
    "SLURM_STEP_ID": "0",
}
KEPT = {"SLURM_CONF": "/etc/s.conf", "SLURM_CONF_SERVER": "ctl", "SLURM_JWT": "t", "MINE": "SLURM_CONF=1\nSBATCH_X=2"}
COMMANDS: dict[str, list[Sequence[str]]] = {
    "sbatch": [command.argv for command in BACKEND.submit_commands(REQUEST)],
    "squeue": [BACKEND.status_argv(["1"]), BACKEND.find_argv("x-1")],
    "sacct": [BACKEND.accounting_argv(["1"]) or []],
    "scancel": [command.argv for command in BACKEND.cancel_commands(["1"])],
    "scontrol": [*BACKEND.nodes_argv()],
    "salloc": [BACKEND.interactive_argv(REQUEST, "true", ())],
    "srun": [BACKEND.attach_argv("1", "n1", "true", ())],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_variables_of_the_user_do_not_reach_slurm(tmp_path: Path, name: str) -> None:
    stand_in = tmp_path / name
    stand_in.write_text(f'#!/bin/bash\nenv -0 >{tmp_path}/environ\nprintf "%s\\0" "$@" >{tmp_path}/words\nexit 3\n')
    stand_in.chmod(0o755)
    for argv in COMMANDS[name]:
        environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", **MEDDLING, **KEPT}
        done = subprocess.run(
            argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=HANG_S, check=False
        )
        assert done.returncode == 3
        given = dict(one.partition("=")[::2] for one in (tmp_path / "environ").read_text().split("\0")[:-1])
        assert not MEDDLING.keys() & given.keys()
        assert KEPT.items() <= given.items()
        words = (tmp_path / "words").read_text().split("\0")[:-1]
        assert name in ("salloc", "srun") or words == list(argv[4:])


@pytest.mark.parametrize("option", ["--clusters=c2", "--clusters c2", "-M c2", "-Mc2", "--cluster=c2"])
@pytest.mark.parametrize("of_kind", [False, True])
def test_a_job_cannot_be_sent_to_another_cluster(refused: Refused, option: str, *, of_kind: bool) -> None:
    options = {"resource_types": {"gpu": {"gpus": 1, "options": [option]}}} if of_kind else {"options": [option]}
    message = refused({"defaults": {"resource_type": "gpu"} if of_kind else {}, **options})
    assert f"cluster site: options: '{option}' sends jobs to another Slurm cluster" in message


def test_similar_options_are_accepted(refused: Refused) -> None:
    assert refused({"options": ["--cluster-constraint=x", "--mem=0"]}) == ""


@pytest.mark.parametrize(("launcher", "granted"), [("torchrun", 100), ("srun", 96), ("mpirun", 96)])
def test_steps_request_no_more_cores_than_the_tasks_have(tmp_path: Path, launcher: str, granted: int) -> None:
    resource = {"gpu": {"gpus": 8, "cores": 100}}
    profile = ClusterProfile(name="s", scheduler="slurm", resource_types=resource, defaults={"resource_type": "gpu"})  # type: ignore[arg-type]
    spec = JobSpec(name="c", launcher=launcher, command=("true",))
    asked = build_request(spec, profile, BACKEND, name="c", run_dir="/runs/c")
    assert asked.tasks_per_node == (1 if launcher == "torchrun" else 8)
    assert f"--cpus-per-task={granted // asked.tasks_per_node}" in BACKEND.directives(asked)
    argv = BACKEND.interactive_argv(asked, 'exec "$@"', ["true"])
    subprocess.run(argv, env=stand_ins(tmp_path), stdin=subprocess.DEVNULL, timeout=HANG_S, check=True)
    assert f"--cpus-per-task={granted}" in (tmp_path / "srun.arguments").read_text().split("\n")
    script = render_case(profile, spec, ranks_per_node=8).script
    assert launcher == "mpirun" or f"--ntasks-per-node=1 --cpus-per-task={granted} " in script


@pytest.mark.parametrize(
    ("job", "cores"),
    [
        ({}, 100),
        ({"launcher": "srun"}, 96),
        ({"launcher": "srun", "gpus_per_node": 3}, 99),
        ({"resource_type": "x"}, None),
    ],
)
def test_an_attached_step_gets_the_cores_of_the_job_on_the_node(
    tmp_path: Path, job: dict[str, object], cores: int | None
) -> None:
    kinds = {"gpu": {"gpus": 8, "cores": 100}}
    values = {"name": "s", "scheduler": "slurm", "runs_root": "/runs", "resource_types": kinds}
    profile = ClusterProfile(**values, defaults={"resource_type": "gpu"})  # type: ignore[arg-type]
    made = make_run(tmp_path, "r", cluster="s")
    record = replace(made.record, job=JobSpec.from_plain({"name": "r", **job}).as_plain())
    context = Context.of(("llmctl",), ("true",), {"HOME": str(tmp_path)}, tmp_path)
    argv = attach_session(context, profile, Attachment(record, {}, place=AttachedJob("17", "n3"))).argv
    asked = re.findall(r"--cpus-per-task=(\d+)", argv[-1])
    assert asked == ([str(cores)] if cores is not None else [])


@pytest.fixture
def refused(home: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Error message of a dry run with a profile; empty if accepted."""
    folder = home / "config" / "llmctl" / "clusters"
    folder.mkdir(parents=True)

    def run(profile: dict[str, object]) -> str:
        (folder / "site.yaml").write_text(json.dumps({"scheduler": "slurm", **profile}))
        code = main(["submit", "--cluster", "site", "--show-script", "--", "true"])
        message = capsys.readouterr().err
        return message if code else ""

    return run

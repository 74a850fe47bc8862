"""What the scripts of jobs in containers hand on, with stand-ins for launchers and containers."""

import pytest

from llmctl.job import JobSpec
from llmctl.profile import ClusterProfile, ContainerProfile
from tests.llmctl.script_cases import RUN_ID, render_case
from tests.llmctl.test_scripts_run import PYTHON, Stage


def run_job(folder, profile, *, launcher, environ=None, nodes=2, command=(), image="/images/one.sqsh"):
    job = JobSpec(name="gpt", nodes=nodes, launcher=launcher, container=image, command=command)
    profile = profile.model_copy(update={"runs_root": str(folder / "runs")})
    rendered = render_case(profile, job, python=PYTHON, ranks_per_node=4, working_dir=folder)
    stage = Stage(folder, environ or {})
    stage.run(rendered.script, folder / "runs" / RUN_ID)
    return stage


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
@pytest.mark.parametrize("runtime", ["enroot", "apptainer"])
def test_a_rank_in_a_container_knows_which_it_is(tmp_path, runtime, launcher):
    profile = ClusterProfile(name="site", scheduler="slurm", container=ContainerProfile(runtime=runtime))
    # A rank of the second node waits for what the head publishes.
    meeting = tmp_path / "runs" / RUN_ID / "attempts" / "1" / "rendezvous"
    published = f"echo 10.0.0.1 20001 >{meeting}"
    software = profile.environment.model_copy(update={"setup": (published,)})
    profile = profile.model_copy(update={"environment": software})
    stage = run_job(tmp_path, profile, launcher=launcher, environ={"LLMCTL_RANK": "5"})
    (got,) = stage.environments()
    name = b"SLURM_PROCID" if launcher == "srun" else b"OMPI_COMM_WORLD_RANK"
    assert (got[name], got[b"NODE_RANK"], got[b"MASTER_PORT"]) == (b"5", b"1", b"20001")
    words = stage.called(runtime)[-1]
    assert words[-4:] == [b"rank", b"1", b"-", b"-"]

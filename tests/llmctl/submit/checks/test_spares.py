"""Spare nodes: what is asked for, what it costs, what the script does with them, and where they are refused."""

import difflib
import json

import pytest
import yaml

from llmctl.backends.base import JobRequest
from llmctl.cli.main import main
from llmctl.site.job import JobSpec
from llmctl.site.profile import ClusterProfile
from llmctl.submit.job import JobCost
from tests.llmctl.scripts.script_cases import ScriptCase
from tests.llmctl.submit.checks.test_chain import CONFIG, ON_ABCI

SPARE = ("--nodes", "2", "--spare-nodes", "1", "--max-restarts", "3")
ASKED = {
    "slurm": ["#SBATCH --nodes=3", "#SBATCH --no-kill"],
    "abci": ["#$ -l rt_F=3"],
    "abci3": ["#PBS -l select=3:", "#PBS -W tolerate_node_failures=all"],
    "lsf": ["#BSUB -n 24"],
}
CHOICE = '    mapfile -t hosts < <("$LLMCTL_PYTHON" -IB "$LLMCTL_RUN_DIR/code/supervisor" choose-nodes --job'


@pytest.fixture
def plan(home, capsys):
    """Plan a run without submitting it; returns the exit code and what llmctl says."""
    (home / "c.yaml").write_text(yaml.safe_dump(CONFIG))

    def call(*arguments: str) -> tuple[int, str]:
        code = main(["submit", *arguments])
        found = capsys.readouterr()
        return code, found.out + found.err

    return call


def added_lines(cluster: str, launcher: str) -> list[str]:
    case = ScriptCase(cluster, launcher, in_container=False)
    before = case.rendered().script.splitlines()
    after = case.rendered(spare_nodes=1, max_restarts=3).script.splitlines()
    return [line[2:] for line in difflib.ndiff(before, after) if line.startswith("+")]


@pytest.mark.parametrize("cluster", ASKED)
def test_the_scheduler_is_asked_for_all_nodes_and_the_script_chooses(cluster):
    added = added_lines(cluster, "torchrun")
    for begin in ASKED[cluster]:
        assert any(line.startswith(begin) for line in added), added
    assert any(line.startswith(CHOICE) for line in added), added
    assert "    ((${#hosts[@]} == 2)) || exit 1" in added
    assert any("requested 3 nodes but got" in line for line in added)
    wanted = {line for line in added if "--nodelist=" in line}
    assert bool(wanted) == (cluster == "slurm"), added


def test_grid_engine_asks_the_nodes_by_its_own_launcher():
    added = added_lines("abci", "torchrun")
    assert '    starter="$(printf \'%q \' "$qrsh" -inherit -nostdin) %h echo answers"' in added
    assert any(line.startswith(CHOICE) and ' --starter "$starter" ' in line for line in added), added


@pytest.mark.parametrize(("launcher", "tasks"), [("torchrun", 2), ("srun", 16)])
def test_srun_starts_the_ranks_on_the_chosen_nodes_alone(launcher, tasks):
    (line,) = (line for line in added_lines("slurm", launcher) if "exec srun" in line)
    assert f"--nodes=2 --ntasks={tasks} " in line and '--nodelist="$(IFS=,; echo "${hosts[*]}")"' in line


def test_the_settings_tell_the_supervisor_of_the_nodes():
    case = ScriptCase("slurm", "torchrun", in_container=False)
    settings = json.loads(case.rendered(spare_nodes=1, max_restarts=3).settings)
    assert (settings["nodes"], settings["spare_nodes"]) == (2, 1)
    assert json.loads(case.rendered().settings)["spare_nodes"] == 0


def test_all_nodes_cost():
    profile = ClusterProfile(name="x", scheduler="slurm")
    request = JobRequest(profile, "r", "/runs/r", nodes=2, spare_nodes=1, time_s=7200)
    assert (JobCost.of(request).nodes, JobCost.of(request).node_hours) == (3, 6)


def test_a_plan_with_spare_nodes(plan):
    code, said = plan("c.yaml", *ON_ABCI, "--launcher", "torchrun", *SPARE, "--time", "1h", "--dry-run")
    assert code == 0 and "3 nodes of rt_F" in said and "3 node-hours" in said and "1 of the nodes spare" in said, said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("c.yaml", *ON_ABCI, "--nodes", "2", "--spare-nodes", "1"),
            "--spare-nodes: a spare node takes part only in a later attempt; give --max-restarts N",
        ),
        (("c.yaml", *ON_ABCI, *SPARE, "--spare-nodes", "-1"), "--spare-nodes: -1 is not valid"),
        (("c.yaml", "--cluster", "local", *SPARE), "--spare-nodes: is not possible on local, which has no scheduler"),
        (("c.yaml", "--cluster", "ssh", *SPARE), "--spare-nodes: is not possible on ssh, which has no scheduler"),
        (
            ("c.yaml", "--cluster", "slurm", *SPARE, "--launcher", "mpirun"),
            "--spare-nodes: does not go with the launcher mpirun, whose nodes llmctl does not choose; "
            "use --launcher torchrun or srun",
        ),
        (
            ("c.yaml", "--cluster", "abci", "--resource-type", "rt_G.small", "--launcher", "torchrun", *SPARE),
            "is not possible with rt_G.small, a part of a node",
        ),
    ],
)
def test_spare_nodes_that_are_refused(plan, arguments, words):
    code, said = plan(*arguments, "--dry-run")
    assert code in (2, 3) and words in said, said


def test_a_negative_number_of_a_record_is_refused():
    with pytest.raises(ValueError, match=r"spare_nodes: -1 is not valid: give a number from 0 on"):
        JobSpec.from_plain({"name": "r", "spare_nodes": -1, "max_restarts": 1})

"""``llmctl scale`` on cluster local, with real runs, and with runs that the test has made."""

import json
import shutil
import socket
from statistics import median

import pytest
import yaml

from llmctl.backends.base import SubmittedJob
from llmctl.cli.main import main
from llmctl.cli.planning import scale_table
from llmctl.errors import SchedulerError
from llmctl.operate.scale import measure
from llmctl.operate.scale.kept import ScalingFiles
from llmctl.runs.record import Submission
from tests.llmctl.run_directories import MadeRun, leave, outcome

CONFIG = {
    "model": {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 128},
    "training": {
        "train_iters": 1000,
        "seq_length": 16,
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "kernel_backend": "reference",
    },
    "optimizer": {"lr": 1e-3, "lr_warmup_iters": 500},
    "data": {"mock_data": True},
}


@pytest.fixture
def place(home):
    (home / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    return home


def runs_of(place):
    folder = place / "runs"
    return sorted(path.name for path in folder.iterdir() if path.name[0] != ".") if folder.exists() else []


class Cluster:
    """Runs that end at once: steps take 8 seconds by the number of nodes, and on ``broken`` nodes the run fails."""

    def __init__(self, place, monkeypatch):
        self.place, self.broken, self.refused, self.queue, self.rows = place, set(), set(), [], 20
        monkeypatch.setattr(measure, "execute_plan", self.execute)

    def execute(self, plan, context):
        nodes = plan.job.spec.nodes
        if nodes in self.refused:
            raise SchedulerError("not submitted: no such queue", transient=False)
        record = plan.record.with_submission(Submission(1, 1.0, (SubmittedJob(socket.gethostname(), "1", 1, 1, "-"),)))
        record.run_dir.mkdir(parents=True)
        record.save(context.transport)
        context.index.add(record)
        run = MadeRun(record)
        self.queue.append((record.name, plan.job.config))
        attempt = run.start_attempt()
        for step in range(1, self.rows + 1):
            run.metrics(step, iteration_time_s=100.0 if step <= 3 else 8.0 / nodes)
        if nodes in self.broken:
            leave(attempt, "failed", 1)
        else:
            outcome(attempt, "completed", 20)
            leave(attempt, "completed")
        return record


@pytest.fixture
def cluster(place, monkeypatch):
    return Cluster(place, monkeypatch)


def scale(capsys, *words, code=0):
    """Standard output and standard error."""
    assert main(["scale", *words]) == code, capsys.readouterr()
    return capsys.readouterr()


def rows(capsys, *words, code=0):
    return json.loads(scale(capsys, *words, "--json", code=code).out)["rows"]


def test_two_sizes_are_trained_measured_and_not_run_again(place, capsys):
    words = ("c.yaml", "--nodes", "1,2", "--steps", "6", "--svg", "a.svg")
    first = rows(capsys, *words)
    assert [(row["nodes"], row["global_batch_size"], row["state"]) for row in first] == [
        *((1, 4, "completed"), (2, 4, "completed")),
    ]
    for row in first:
        run = place / "runs" / row["run_id"]
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        times = [step["iteration_time_s"] for step in steps if "lm_loss" in step]
        assert row["iteration_time_s"] == median(times[3:]) and len(times) == 6
        assert row["prediction_error"] == row["predicted_iteration_time_s"] / row["iteration_time_s"] - 1
        assert not [step for step in steps if "valid_loss" in step]
        assert not [path for path in run.rglob("*") if "optimizer" in path.name]
    before = runs_of(place)
    assert len(before) == 2 and "<svg" in (place / "a.svg").read_text()
    assert rows(capsys, *words) == first == rows(capsys, "c")
    assert runs_of(place) == before


@pytest.mark.usefixtures("cluster")
def test_rows_come_in_order_with_efficiency(capsys):
    found = scale(capsys, "c.yaml", "--nodes", "4,1,2")
    heading, *lines = [line.split() for line in found.out.splitlines()]
    assert [line[0] for line in lines] == ["c-1n", "c-2n", "c-4n"]
    of = {name: [line[heading.index(name)] for line in lines] for name in ("S/STEP", "BATCH")}
    assert of == {"S/STEP": ["8.00", "4.00", "2.00"], "BATCH": ["4", "4", "4"]}
    assert [row["efficiency"] for row in rows(capsys, "c")] == [1.0, 1.0, 1.0]


def test_weak_scaling_grows_the_batch(cluster, capsys):
    found = rows(capsys, "c.yaml", "--nodes", "1,2,4", "--weak", "--name", "w")
    assert [row["global_batch_size"] for row in found] == [4, 8, 16]
    assert [row["efficiency"] for row in found] == [1.0, 2.0, 4.0]
    batches = {name: config.training.global_batch_size for name, config in cluster.queue}
    assert batches == {"w-1n": 4, "w-2n": 8, "w-4n": 16}


def test_a_further_size_joins_those_that_have_run(cluster, capsys):
    rows(capsys, "c.yaml", "--nodes", "1,2")
    found = rows(capsys, "c.yaml", "--nodes", "4")
    assert [row["nodes"] for row in found] == [1, 2, 4]
    assert [name for name, _ in cluster.queue] == ["c-1n", "c-2n", "c-4n"]


@pytest.mark.usefixtures("cluster")
def test_a_smaller_size_is_awaited_before_the_row_of_a_larger_one(capsys):
    rows(capsys, "c.yaml", "--nodes", "2", "--weak")
    lines = scale(capsys, "c.yaml", "--nodes", "1,2", "--weak").out.splitlines()
    assert [line.split()[0] for line in lines] == ["RUN", "c-1n", "c-2n"]
    assert [line.split()[7] for line in lines[1:]] == ["100.0%", "200.0%"]


def test_a_size_that_failed_is_told_and_run_again_only_if_asked(cluster, capsys):
    cluster.broken = {2}
    words = ("c.yaml", "--nodes", "1,2")
    found = scale(capsys, *words, code=6)
    assert [line.split()[-1] for line in found.out.splitlines()] == ["STATE", "completed", "failed"]
    assert "c-2n-" in found.err and "--again runs failed sizes again" in found.err
    scale(capsys, *words, code=6)
    assert "failed" in scale(capsys, "c").err
    assert [name for name, _ in cluster.queue] == ["c-1n", "c-2n"]
    cluster.broken = set()
    assert [row["state"] for row in rows(capsys, *words, "--again")] == ["completed"] * 2
    assert [name for name, _ in cluster.queue] == ["c-1n", "c-2n", "c-2n"]


def test_a_size_that_was_not_accepted_is_submitted_by_the_next_call(cluster, capsys):
    cluster.refused = {2}
    assert "no such queue" in scale(capsys, "c.yaml", "--nodes", "1,2", code=4).err
    assert [run.nodes for run in ScalingFiles(cluster.place / "state/llmctl").find("c").runs] == [1]
    cluster.refused = set()
    assert [row["state"] for row in rows(capsys, "c.yaml", "--nodes", "1,2")] == ["completed"] * 2
    assert [name for name, _ in cluster.queue] == ["c-1n", "c-2n"]


def test_a_run_whose_directory_is_gone_is_not_waited_for(cluster, capsys):
    rows(capsys, "c.yaml", "--nodes", "1,2")
    (gone,) = (name for name in runs_of(cluster.place) if name.startswith("c-2n"))
    shutil.rmtree(cluster.place / "runs" / gone)
    assert [row["nodes"] for row in rows(capsys, "c", "--follow")] == [1]
    assert [row["state"] for row in rows(capsys, "c.yaml", "--nodes", "1,2")] == ["completed"] * 2
    assert [name for name, _ in cluster.queue] == ["c-1n", "c-2n", "c-2n"]


def test_a_run_that_cannot_be_read_is_kept(cluster, capsys):
    """It may still be going on: another one would be a second job."""
    rows(capsys, "c.yaml", "--nodes", "1")
    (name,) = runs_of(cluster.place)
    (cluster.place / "runs" / name / "run.json").write_text("{")
    assert [row["state"] for row in rows(capsys, "c")] == ["unknown"]


def test_a_run_with_too_few_rows_has_no_speed(cluster, capsys):
    cluster.rows = 5
    assert "has too few rows of metrics after the first 3" in scale(capsys, "c.yaml", "--nodes", "1", code=6).err


def test_hosts_without_shared_files_save_in_a_folder_of_the_run(place, capsys):
    folder = place / "config/llmctl/clusters"
    folder.mkdir(parents=True)
    profile = {"scheduler": "ssh", "hosts": ["a", "b"], "shared": False, "runs_root": "/runs"}
    (folder / "two.yaml").write_text(yaml.safe_dump(profile))
    words = ("c.yaml", "--cluster", "two", "--nodes", "1,2", "--dry-run")
    assert "checkpoint.save: is unset: the hosts of two share no runs_root" in scale(capsys, *words, code=2).err
    found = scale(capsys, *words, "--set", "checkpoint.save=/nfs/kept").err
    assert "/nfs/kept-scale/c-1n-" in found and "/nfs/kept-scale/c-2n-" in found


def test_the_reason_why_there_is_no_prediction_is_told(place, capsys):
    folder = place / "config/llmctl/clusters"
    folder.mkdir(parents=True)
    profile = {"scheduler": "slurm", "resource_types": {"x": {"gpus": 1}}, "defaults": {"resource_type": "x"}}
    (folder / "bed.yaml").write_text(yaml.safe_dump({**profile, "runs_root": f"{place}/runs"}))
    found = scale(capsys, "c.yaml", "--cluster", "bed", "--nodes", "1,2", "--dry-run")
    assert found.err.count("no prediction: unknown: the profile names no known GPU") == 1
    assert found.out.count("no prediction") == 2


@pytest.mark.usefixtures("cluster")
def test_a_terminal_has_a_plot_below_the_table(capsys, monkeypatch):
    rows(capsys, "c.yaml", "--nodes", "1,2")
    assert "tokens/s over nodes" not in scale(capsys, "c").out
    monkeypatch.setattr(scale_table, "is_for_people", lambda: True)
    assert "tokens/s over nodes" in scale(capsys, "c").out


@pytest.mark.usefixtures("cluster")
def test_ctrl_c_says_how_to_come_back(capsys, monkeypatch):
    rows(capsys, "c.yaml", "--nodes", "1")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(measure.SizeSurvey, "look", interrupted)
    found = scale(capsys, "c", "--follow", code=130)
    assert "llmctl scale c --follow" in found.err and "llmctl cancel c-Nn" in found.err


def test_all_problems_are_told_before_anything_is_submitted(cluster, capsys):
    found = scale(capsys, "c.yaml", "--nodes", "1,2,3,8", "--set", "model.num_layer=2", code=2).err
    lines = found.splitlines()
    assert "c.yaml: training.global_batch_size: 4 cannot be divided among the replicas of 3, 8 nodes" in lines[0]
    assert lines[0].endswith("use 24, the nearest for --nodes 1,2,3,8: --set training.global_batch_size=24")
    assert lines[1] == "also: --set model.num_layer: unknown key; did you mean model.num_layers?"
    assert runs_of(cluster.place) == [] and cluster.queue == []


def test_a_problem_of_some_sizes_names_them(cluster, capsys):
    layout = {"parallel": {"tensor_model_parallel_size": 2}}
    (cluster.place / "c.yaml").write_text(yaml.safe_dump({**CONFIG, **layout}))
    found = scale(capsys, "c.yaml", "--nodes", "1,2,3,4", code=2).err
    assert "--nodes 1: " in found and "--nodes 3: " in found and "does not divide the world size 3" in found
    assert "--nodes: " not in found and "--nodes 2" not in found and cluster.queue == []


def test_a_dry_run_predicts_and_submits_nothing(cluster, capsys):
    found = scale(capsys, "c.yaml", "--nodes", "1,2", "--dry-run")
    assert [line.split()[-1] for line in found.out.splitlines()] == ["STATE", "predicted", "predicted"]
    assert "nothing was submitted" in found.err
    (first, second) = rows(capsys, "c.yaml", "--nodes", "1,2", "--dry-run")
    assert first["predicted_efficiency"] == 1.0 and second["predicted_efficiency"] > 0
    assert (first["run_id"], first["iteration_time_s"]) == (None, None)
    assert cluster.queue == [] and not (cluster.place / "state/llmctl/scaling").exists()


def test_the_cost_of_all_jobs_is_told_before(place, capsys):
    folder = place / "config/llmctl/clusters"
    folder.mkdir(parents=True)
    kind = {"gpus": 2, "gpu": "V100", "gpu_memory_gib": 16, "points_per_hour": 2.0}
    profile = {"scheduler": "slurm", "resource_types": {"v": kind}, "defaults": {"resource_type": "v"}}
    (folder / "bed.yaml").write_text(yaml.safe_dump({**profile, "runs_root": f"{place}/runs"}))
    words = ("c.yaml", "--cluster", "bed", "--nodes", "1,2", "--time", "30m", "--dry-run")
    assert (
        "2 jobs ask for 3 nodes of v x 2 GPUs x 0.5 h = 1.5 node-hours, at most 3 points" in scale(capsys, *words).err
    )
    document = json.loads(scale(capsys, *words, "--json").out)
    assert (document["node_hours"], document["points"], document["unit"]) == (1.5, 3.0, "points")


def test_runs_of_another_training_stay_out_of_the_table(cluster, capsys):
    rows(capsys, "c.yaml", "--nodes", "1")
    for words, told in (
        (("--set", "training.seq_length=32"), "training.seq_length was 16, is 32"),
        (("--steps", "30"), "--steps was 20, is 30"),
        (("--weak",), "--weak was False, is True"),
    ):
        found = scale(capsys, "c.yaml", "--nodes", "1,2", *words, code=2).err
        assert told in found and "give another --name, or remove" in found and found.count("\n") == 1
    assert len(cluster.queue) == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("c.yaml",), "--nodes: no scaling is called 'c.yaml'; to measure, give the numbers of nodes"),
        ((), "--nodes: to measure, give the numbers of nodes, such as --nodes 1,2,4,8"),
        (("c", "--again", "--weak"), "--weak, --again: goes with --nodes"),
        (("c.yaml", "--nodes", "1,x"), "--nodes 1,x: 'x' is not a number of nodes"),
        (("c.yaml", "--nodes", "1", "--steps", "3"), "--steps 3: the first steps do not count; give 6 or more"),
        (("c.yaml", "--nodes", "1", "--svg", "none/a.svg"), "--svg none/a.svg: cannot be written; name a file"),
        (("absent.yaml", "--nodes", "1"), "absent.yaml"),
    ],
)
def test_a_mistake_is_one_sentence(place, capsys, words, told):
    found = scale(capsys, *words, code=2)
    assert told in found.err and found.err.count("\n") == 1 and found.out == ""
    assert runs_of(place) == []


@pytest.mark.usefixtures("cluster")
def test_a_name_that_is_wrong_shows_those_that_there_are(capsys):
    rows(capsys, "c.yaml", "--nodes", "1")
    assert "scalings that there are: c" in scale(capsys, "d", code=2).err

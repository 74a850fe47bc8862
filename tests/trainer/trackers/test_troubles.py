"""Real trainings whose tracker is missing, raises or hangs."""

import json
import threading

from tests.trainer.trackers.tracked_run import log, prepare, rows, train
from tests.trainer.training.pretraining_job import Job
from tests.waiting import HANG_S


class Broken:
    """A tracker that raises at every row, and hangs at its end, also while Python ends."""

    def begin(self, facts):
        self.facts = facts

    def log(self, iteration, scalars):
        raise ValueError(f"no room for {len(scalars)} numbers of iteration {iteration}")

    def end(self, outcome):
        (self.facts.folder / outcome).touch()
        threading.Event().wait(HANG_S)


def wait_for_no_tracker():
    """A fault: rank 0 does not wait for trackers at its end."""
    from trainer.trackers import tracking

    tracking._LAST_WAIT_S = dict.fromkeys(tracking._LAST_WAIT_S, 0.5)


def break_the_optimizer():
    """A fault: the first step raises."""
    from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer

    MixedPrecisionOptimizer.launch = None


def miss_packages():
    """A fault: no package of a tracker is installed."""
    from trainer.trackers import choice

    choice.find_spec = lambda _: None


def test_a_run_completes_beside_a_tracker_that_raises_and_hangs(tmp_path):
    run = tmp_path / "run"
    prepare(run, logging={"trackers": [f"{__name__}:Broken"]})
    with Job(run, 1, faults={0: wait_for_no_tracker}) as job:
        assert job.ends([0]) == [0]
    said = log(run)
    assert said.count("failed at iteration 1: ValueError: no room for") == 1
    assert "no room" not in said.partition("failed at iteration 1")[2].partition("\n")[2]
    assert "Broken has not ended within" in said and (run / "completed").exists()
    assert len(rows(run)) == 8
    assert json.loads((run / "attempts/1/outcome.json").read_text())["reason"] == "completed"
    assert "has not ended within" in json.loads((run / "attempts/1/heartbeat/rank-00000.json").read_text())["warning"]


def test_a_missing_package_ends_the_run_before_the_first_step(tmp_path):
    run = tmp_path / "run"
    prepare(run, logging={"tensorboard_dir": str(tmp_path / "events")})
    with Job(run, 1, faults={0: miss_packages}) as job:
        assert job.ends([0]) == [3]
    error = json.loads((run / "attempts/1/errors/rank-00000.json").read_text())
    assert error["message"].startswith("logging.tensorboard_dir: needs a package that is not installed")
    assert not (run / "metrics.jsonl").exists() and not (tmp_path / "events").exists()


def test_a_failed_run_ends_its_trackers_as_failed(tmp_path):
    run = tmp_path / "run"
    prepare(run, logging={"trackers": [f"{__name__}:Noting"]})
    with Job(run, 1, faults={0: break_the_optimizer}) as job:
        assert job.ends([0]) == [1]
    assert (run / "failed").exists()


class Noting:
    """A tracker that notes the outcome."""

    def begin(self, facts):
        self.folder = facts.folder

    def log(self, iteration, scalars):
        pass

    def end(self, outcome):
        (self.folder / outcome).touch()


def test_trackers_are_left_out_by_null(tmp_path):
    run = tmp_path / "run"
    prepare(run, logging={"tensorboard_dir": None, "wandb_project": None})
    train(run)
    assert len(rows(run)) == 8

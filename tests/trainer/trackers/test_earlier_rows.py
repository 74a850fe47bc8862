"""Rows of earlier attempts, which a tracker that lacks them gets first."""

import json

from tests.trainer.trackers.tracked_run import computed, expected, prepare, train
from trainer.trackers.earlier_rows import earlier_rows


def test_of_rows_that_were_done_again_the_last_counts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"iteration": n, "lm_loss": n / 2, "consumed_samples": 8 * n} for n in (1, 2, 3)]
    rows += [{"iteration": 3, "valid_loss": 1.0}, {"iteration": 3, "tasks": {}}]
    again = [{"iteration": n, "lm_loss": n / 4, "consumed_samples": 8 * n} for n in (3, 4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *again]) + '{"iteration": 2, "lm_l')
    found = list(earlier_rows(path, after=1, until=3))
    assert found == [rows[1], again[0], {**rows[3], "consumed_samples": 24}, {**rows[4], "consumed_samples": 24}]
    assert list(earlier_rows(path, after=3, until=3)) == []
    assert list(earlier_rows(tmp_path / "nothing", after=0, until=3)) == []


def test_samples_between_training_rows_are_those_of_batches_that_grow(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"iteration": n, "lm_loss": 1.0, "consumed_samples": count} for n, count in ((2, 8), (4, 24))]
    rows += [{"iteration": n, "valid_loss": 1.0} for n in (4, 5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = list(earlier_rows(path, after=0, until=5))
    assert [row["consumed_samples"] for row in found] == [8, 24, 24, 32]


class Listing:
    """A user's tracker that writes a line per row into the run directory, and wants all earlier rows."""

    def begin(self, facts):
        self.file = (facts.folder / "listed.jsonl").open("a")
        return 0

    def log(self, iteration, scalars):
        self.file.write(json.dumps([iteration, scalars]) + "\n")

    def end(self, outcome):
        self.file.write(json.dumps([outcome, {}]) + "\n")
        self.file.close()


def test_a_tracker_of_ones_own_that_is_new_in_a_resumed_run_gets_all_rows(tmp_path):
    run = tmp_path / "run"
    prepare(run, training={"exit_interval": 4})
    train(run)
    prepare(run, logging={"trackers": [f"{__name__}:Listing"]})
    train(run, number=2)
    points = {}
    for iteration, scalars in map(json.loads, (run / "listed.jsonl").read_text().splitlines()):
        for name, value in scalars.items():
            points.setdefault(name, {})[iteration] = value
    assert iteration == "completed"
    assert computed(points) == computed(expected(run))

"""Short real trainings of one rank whose rows go to trackers."""

import itertools
import json
import math
import os
import signal
from functools import partial

from tests.resume_torture import config_of
from tests.trainer.training.pretraining_job import Job
from trainer.trackers.scalars import scalars_of


def prepare(run, **sections):
    """Write the config of a training of six iterations into the folder ``run``, with an evaluation at three and six."""
    values = config_of("tp2")
    values["parallel"] = {}
    # With auto, a first attempt computes by torch until the library is built, and the next one by other kernels.
    training = {"train_iters": 6, "eval_interval": 3, "kernel_backend": "torch"}
    changes = {"training": training, "checkpoint": {"save_interval": 2}}
    for section, keys in [*changes.items(), *sections.items()]:
        values[section] = {**values.get(section, {}), **keys}
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(json.dumps(values))


def set_variables(variables):
    """A fault that changes the environment."""
    os.environ.update(variables)


def train(run, number=1, variables=None):
    """Train to the end as attempt ``number``, with further environment variables; the log of its rank."""
    with Job(run, 1, faults={0: partial(set_variables, variables or {})}, number=number) as job:
        assert job.ends([0]) == [0], log(run, number)
    return log(run, number)


def log(run, number=1):
    return (run / "attempts" / str(number) / "rank-00000.log").read_text()


def rows(run):
    """All rows of metrics.jsonl but those of saves, with those that were done again only as they were at last."""
    found = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "save_bytes" not in row:
            found[row["iteration"], "valid_loss" in row] = row
    return [found[key] for key in sorted(found)]


def expected(run, batch_size=8):
    """Name -> iteration -> number, of all rows."""
    found = {}
    for row in rows(run):
        more = {"consumed_samples": row["iteration"] * batch_size}
        if "lm_loss" in row:
            more["batch_size"] = batch_size
        for name, value in scalars_of({**row, **more}).items():
            assert math.isfinite(value)
            found.setdefault(name, {})[row["iteration"]] = value
    return found


def computed(points):
    """The numbers of ``expected`` that a resumed run computes again, and that metrics.jsonl has."""
    measured = {"iteration-time", "tokens_per_s", "throughput", "mfu", "mem-max-allocated-bytes", "batch-size"}
    return {name: values for name, values in points.items() if name not in measured}


def kill_at_iteration_6(variables):
    """A fault: SIGKILL when the optimizer step of the sixth iteration begins."""
    from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer

    os.environ |= variables
    launch, numbers = MixedPrecisionOptimizer.launch, itertools.count(1)

    def counted(self, lr):
        if next(numbers) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return launch(self, lr)

    MixedPrecisionOptimizer.launch = counted


def train_until_killed(run, variables=None):
    """Train as the first attempt, until iteration 6 begins; the newest checkpoint is that of iteration 4."""
    with Job(run, 1, faults={0: partial(kill_at_iteration_6, variables or {})}) as job:
        assert job.ends([0]) == [-signal.SIGKILL], log(run)

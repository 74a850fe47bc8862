"""Trainings of the example of hooks, with the module of the test beside that of the example."""

import json
import math
import sys
from functools import partial
from pathlib import Path

import yaml

from tests.trainer.training.pretraining_job import Job

EXAMPLE = Path(__file__).parents[3] / "examples" / "hooks"
WORLD_SIZES = {"serial": 1, "tp2": 2, "pp2": 2, "dp2": 2}
PARALLEL = {
    "serial": {},
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp2": {},
}


def add_to_path(folders):
    """A fault that finds further modules."""
    sys.path[:0] = folders


def config_of(layout, **sections):
    """The example's config in a layout, with other keys."""
    values = yaml.safe_load((EXAMPLE / "hooks.yaml").read_text())
    for section, keys in [("parallel", PARALLEL[layout]), *sections.items()]:
        values[section] = {**values.get(section, {}), **keys}
    return values


def train(run, layout, number=1, folders=(), code=0, **sections):
    """Train the example in a layout; all ranks end with ``code``."""
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(json.dumps(config_of(layout, **sections)))
    add = partial(add_to_path, [str(EXAMPLE), *map(str, folders)])
    ranks = range(WORLD_SIZES[layout])
    with Job(run, len(ranks), faults=dict.fromkeys(ranks, add), number=number) as job:
        found = job.ends(ranks)
    assert found == [code] * len(ranks), log(run, number)
    return run


def log(run, number=1, rank=0):
    return (run / "attempts" / str(number) / f"rank-{rank:05d}.log").read_text()


def rows(run):
    """Rows of training and of validation, by iteration."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    training = {row["iteration"]: row for row in found if "lm_loss" in row}
    return training, {row["iteration"]: row for row in found if "valid_loss" in row}


def without(*keys):
    """The example's functions without some."""
    hooks = yaml.safe_load((EXAMPLE / "hooks.yaml").read_text())["hooks"]
    return {key: type(hooks[key])() if isinstance(hooks[key], list) else None for key in keys}


def rate_of_example(step):
    return 1e-3 * min((step + 1) / 4, math.sqrt(4 / (step + 1)))

"""Changes to the training config of a short run, so that it measures steps and nothing else. Pure."""

from collections.abc import Iterator, Mapping
from os.path import normpath
from typing import Any

from llmctl.operate.scale.sizes import BATCH, section
from llmctl.runs.series.steady import FIRST_ROWS, LEAST_ROWS
from llmctl.submit.job import Flag

BY = "llmctl scale"
"""Origin of these values, in messages and in the record of the run."""
LEAST_STEPS = FIRST_ROWS + LEAST_ROWS
"""Iterations of the shortest run that can be measured."""
_UNCHANGED: Mapping[str, Any] = {
    # The batch has its full size from the first step on.
    "training.rampup_batch_size": [],
    "training.step_batch_size_schedule": None,
    "training.eval_iters": 0,
    "training.exit_interval": None,
    "training.exit_duration_in_mins": None,
    "training.iterations_to_skip": [],
    "training.check_weight_hash_across_dp_replicas_interval": None,
    # No checkpoint of this run is one that a real run would go on from; only the weights are saved, at the end.
    "checkpoint.save": None,
    "checkpoint.save_interval": None,
    "checkpoint.no_save_optim": True,
    "checkpoint.verify_after_save": "off",
    "checkpoint.async_save": False,
    "checkpoint.save_hugging_face": False,
    "checkpoint.copy_interval": None,
    "checkpoint.copy_folder": None,
    "evaluation.tasks": [],
    "evaluation.every": None,
    "evaluation.limit": None,
    "logging.log_interval": 1,
    "logging.numbers_interval": None,
    "logging.timing_log_level": 0,
    "logging.profile_steps": None,
    "logging.tensorboard_dir": None,
    "logging.wandb_project": None,
    "logging.mlflow_tracking_uri": None,
    "logging.trackers": [],
    # A run that fails at a size says so, and does not hold nodes for a second try.
    "job.max_restarts": 0,
    "job.spare_nodes": 0,
    "job.chain": None,
}
_NOT_OF_SPEED = frozenset(
    f"job.{key}"
    for key in ("name", "nodes", "time", "group", "reservation", "priority", "exclude", "notify", "notify_on")
)


def changed_values(values: Mapping[str, Any], batch: int | None, steps: int, by: str = BY) -> Iterator[Flag]:
    """The values that a short run has in the place of the config's.

    Args:
        values: of the config, as given.
        batch: global batch; None: that of the config.
        steps: iterations.
        by: command that sets them.
    """
    yield Flag("--steps", "training.train_iters", steps)
    if batch is not None:
        yield Flag(by, BATCH, batch)
    yield from (Flag(by, key, value) for key, value in _UNCHANGED.items())
    training, optimizer, checkpoint = (section(values, name) for name in ("training", "optimizer", "checkpoint"))
    if training.get("on_loss_spike") == "roll_back":  # there is no checkpoint to go back to
        yield Flag(by, "training.on_loss_spike", "tell")
    length = training.get("train_iters")
    if optimizer.get("lr_decay_iters") is None and type(length) is int:
        # The schedule stays that of the whole run: its warmup may be longer than these steps.
        yield Flag(by, "optimizer.lr_decay_iters", max(length, steps))
    load, save = checkpoint.get("load"), checkpoint.get("save")
    if isinstance(load, str):
        goes_on = isinstance(save, str) and normpath(load) == normpath(save)
        # Of the weights alone a run begins at step 0, however far the checkpoint is.
        yield Flag(by, *(("checkpoint.load", None) if goes_on else ("checkpoint.finetune", True)))


def compared_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by dotted key, without those that do not change the speed of a size."""
    found: dict[str, Any] = {}
    for name, part in values.items():
        if isinstance(part, Mapping):
            found |= {f"{name}.{key}": value for key, value in part.items()}
        else:
            found[name] = part
    return {key: value for key, value in found.items() if key not in _NOT_OF_SPEED}

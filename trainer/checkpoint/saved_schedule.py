"""The schedule of a checkpoint for a run that continues it (optimizer.use_checkpoint_opt_param_scheduler)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.directory import CheckpointError, is_own_checkpoint
from trainer.checkpoint.metadata import CheckpointMetadata, load_metadata
from trainer.config.sections.optimizer import OptimizerConfig
from trainer.config.train_config import TrainConfig
from trainer.optimizer.learning_rate import decay_iters, warmup_iters

if TYPE_CHECKING:
    from trainer.checkpoint.save import CheckpointWriter

_AS_THEY_ARE = (
    "lr",
    "min_lr",
    "lr_decay_style",
    "weight_decay",
    "start_weight_decay",
    "end_weight_decay",
    "weight_decay_incr_style",
)
"""Keys of the section ``optimizer`` that Megatron-LM takes from the checkpoint, beside the lengths."""


def follow_saved_schedule(
    config: TrainConfig, restored: Path | None, save: Path | None, writer: CheckpointWriter | None, rank: int
) -> tuple[TrainConfig, CheckpointWriter | None]:
    """Config and writer with the schedule of the checkpoint that a run continues; as they are if it continues none.

    Rank 0 prints the keys that change.

    Args:
        config: the run's config.
        restored: the checkpoint that has been loaded; None without one.
        save: folder of the run's own checkpoints, which are always loaded completely.
        writer: of the run's checkpoints, which record the schedule.
        rank: this rank.

    Raises:
        CheckpointError: the checkpoint has no schedule, or weight decay that grows over another length.
    """
    if restored is None or not _is_wanted(config, restored, save):
        return config, writer
    metadata = load_metadata(restored)
    changes = {} if metadata.is_imported else _changes(config, metadata, restored)
    if not changes:
        return config, writer
    if rank == 0:
        now = config.optimizer
        told = ", ".join(f"{key} {value!r} instead of {getattr(now, key)!r}" for key, value in changes.items())
        print(f"the schedule of {restored} goes on: {told}", flush=True)
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update=changes)})
    return config, writer if writer is None else replace(writer, config=config)


def _is_wanted(config: TrainConfig, restored: Path, save: Path | None) -> bool:
    """True if the run takes the whole state of a checkpoint, and the config asks for its schedule."""
    takes_all = is_own_checkpoint(restored, save) or not (config.checkpoint.finetune or config.checkpoint.no_load_optim)
    return config.optimizer.use_checkpoint_opt_param_scheduler and takes_all and restored.name.startswith("iter_")


def _changes(config: TrainConfig, metadata: CheckpointMetadata, restored: Path) -> dict[str, Any]:
    """Keys of the section ``optimizer`` that the checkpoint sets to another value."""
    now, length = config.optimizer, config.full_iters
    try:
        saved_length = _saved_length(metadata.config)
        stored = metadata.config["optimizer"]
        saved = OptimizerConfig(**{key: stored[key] for key in OptimizerConfig.model_fields if key in stored})
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{restored} has no schedule that can be read: {error}") from None
    if saved.weight_decay_incr_style != "constant" and saved_length != length:
        raise CheckpointError(
            f"training.train_iters {length:g} is not that of {restored}, {saved_length:g}, over which its weight decay "
            "grows; set the same number, or unset optimizer.use_checkpoint_opt_param_scheduler"
        )
    found: dict[str, Any] = {key: getattr(saved, key) for key in _AS_THEY_ARE}
    changes = {key: value for key, value in found.items() if value != getattr(now, key)}
    return changes | _lengths(now, length, saved, saved_length)


def _saved_length(values: Mapping[str, Any]) -> float:
    """Length of the run that saved, in full batches: see TrainConfig.full_iters."""
    training = values["training"]
    if not training.get("rampup_batch_size") and training.get("step_batch_size_schedule") is None:
        return float(training["train_iters"])
    return TrainConfig.model_validate(values).full_iters


def _lengths(now: OptimizerConfig, length: float, saved: OptimizerConfig, saved_length: float) -> dict[str, Any]:
    """Decay and warmup of the checkpoint in iterations, where those of the config differ."""
    changes: dict[str, Any] = {}
    if decay_iters(saved, saved_length) != decay_iters(now, length):
        changes["lr_decay_iters"] = decay_iters(saved, saved_length)
    if changes or warmup_iters(saved, saved_length) != warmup_iters(now, length):
        changes |= {"lr_warmup_iters": warmup_iters(saved, saved_length), "lr_warmup_fraction": None}
    return changes

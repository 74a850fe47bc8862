"""Where a run goes on from: its own latest checkpoint, a start point, or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trainer.checkpoint.directory import (
    METADATA,
    AnotherModelError,
    CheckpointError,
    checkpoint_path,
    find_latest,
)
from trainer.checkpoint.load import read_training_state, read_weights, resume_optimizer
from trainer.checkpoint.metadata import load_metadata
from trainer.config.errors import ConfigError
from trainer.distributed.collectives import any_rank, from_first_rank
from trainer.process.failure import PeerFailedError

if TYPE_CHECKING:
    from trainer.config.sections import CheckpointConfig
    from trainer.config.train_config import TrainConfig
    from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
    from trainer.parallel_model import ParallelModel
    from trainer.process.progress import TrainingProgress

_NOTHING, _OWN, _START_POINT, _FAILED = range(4)

# Keys of the model section that no tensor's shape gives away.
_MEANINGS = (
    "num_attention_heads",
    "num_query_groups",
    "position_embedding_type",
    "rotary_percent",
    "swiglu",
    "openai_gelu",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
)
# These a model can be brought to by training on, as it is done for longer contexts.
_TUNABLE_MEANINGS = ("rotary_base", "norm_epsilon", "moe_expert_capacity_factor", "moe_token_drop_policy")


def check_start_point(config: CheckpointConfig, save: Path | None) -> None:
    """Refuse a start point that is not there, or that a resume could not tell from the run's own checkpoints.

    Raises:
        ConfigError: names the key.
    """
    if config.load is None:
        return
    load = Path(config.load).expanduser()
    is_same = save is not None and load.resolve() == save.resolve()
    takes_less = config.finetune or config.no_load_optim or config.no_load_rng
    if is_same and takes_less:
        raise ConfigError(
            "checkpoint.save",
            f"{save} is checkpoint.load too; with finetune or no_load_* the next attempt could not tell the start "
            "point from its own checkpoints; choose another folder to save in",
        )
    if (load / METADATA).is_file():
        raise ConfigError(
            "checkpoint.load", f"{load} is a single checkpoint; name the folder that holds it, {load.parent}"
        )
    # Megatron's scripts give one folder for both from the first start on, when it is still empty.
    if not is_same and find_latest(load)[0] is None:
        raise ConfigError("checkpoint.load", f"{load} holds no checkpoint; correct the path, or unset it to start anew")


def restore(
    config: TrainConfig,
    save: Path | None,
    model: ParallelModel,
    optimizer: MixedPrecisionOptimizer,
    progress: TrainingProgress,
    device: torch.device,
) -> Path | None:
    """Bring model, optimizer and progress to where the run goes on; returns the checkpoint if there is one.

    The run's own checkpoints under ``save`` always come first and whole; finetune and no_load_* are about the start
    point only. Collective: all ranks; rank 0 chooses, so that a file system that shows ranks different things cannot
    divide them.

    Raises:
        CheckpointError: the chosen checkpoint cannot be read or is of another model.
        PeerFailedError: so it is for another rank.
    """
    wanted = config.checkpoint
    roots = {_OWN: save, _START_POINT: Path(wanted.load).expanduser() if wanted.load else None}
    source, path = _agree_on_checkpoint(roots, model.mesh.rank, device)
    if path is None:
        return None
    seed = progress.seed
    weights_only = wanted.no_save_optim if source == _OWN else wanted.finetune or wanted.no_load_optim
    problem: Exception | None = None
    try:
        _check_same_meaning(path, config)
        metadata = read_weights(path, model) if weights_only else read_training_state(path, model, optimizer)
    except Exception as error:
        problem = error
    # Before any rank waits for the others' weights, and whatever it is: they would wait until their timeout.
    if any_rank(problem is not None, device):
        raise problem or PeerFailedError(f"{path} cannot be read: another rank says why")
    if weights_only:
        optimizer.adopt_weights()
        model.gradients.weights_changed()
        model.gradients.wait_for_weights()
    else:
        resume_optimizer(metadata, model, optimizer)
    if source == _START_POINT and wanted.finetune:
        return path
    try:
        progress.load(metadata.progress)
    except KeyError as error:
        raise CheckpointError(f"{path} does not say its {error}") from None
    if source == _START_POINT and wanted.no_load_rng:
        progress.seed = seed
    return path


def _check_same_meaning(checkpoint: Path, config: TrainConfig) -> None:
    """Refuse a model section in which the stored weights, although of the right shapes, would be another model."""
    stored, model = load_metadata(checkpoint).config.get("model"), config.model
    if not stored:
        return
    # A key that the trainer did not know when it wrote the checkpoint has had its default ever since.
    defaults = {key: field.default for key, field in type(model).model_fields.items() if not field.is_required()}
    stored = defaults | stored
    stored["num_query_groups"] = stored["num_query_groups"] or stored.get("num_attention_heads")
    present = {**model.model_dump(), "num_query_groups": model.query_groups}
    for key in _MEANINGS if config.checkpoint.finetune else _MEANINGS + _TUNABLE_MEANINGS:
        if key in stored and stored[key] != present[key]:
            remedy = ", or take only the weights with checkpoint.finetune" if key in _TUNABLE_MEANINGS else ""
            raise AnotherModelError(
                f"{checkpoint} was written with model.{key} {stored[key]}, and this run has {present[key]}, another "
                f"model of the same weights; set it to the former{remedy}"
            )


def _agree_on_checkpoint(roots: dict[int, Path | None], rank: int, device: torch.device) -> tuple[int, Path | None]:
    choice = [_NOTHING, 0]
    problem: Exception | None = None
    if rank == 0:
        try:
            choice = _choose(roots)
        except Exception as error:
            choice, problem = [_FAILED, 0], error
    source, iteration = from_first_rank(choice, device)
    if isinstance(problem, OSError):
        raise CheckpointError(str(problem)) from problem
    if problem is not None:
        raise problem
    if source == _FAILED:
        raise PeerFailedError("rank 0 found no checkpoint that can be read, and says why")
    root = roots.get(source)
    return source, None if root is None else checkpoint_path(root, iteration)


def _choose(roots: dict[int, Path | None]) -> list[int]:
    for source, root in roots.items():
        path, note = find_latest(root) if root is not None else (None, None)
        if note:
            print(note, flush=True)
        if path is not None:
            return [source, int(path.name.removeprefix("iter_"))]
    return [_NOTHING, 0]

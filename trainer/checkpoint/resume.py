"""Choice and load of a run's start checkpoint.

A run starts from its own latest checkpoint, a start point, or none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainer.checkpoint.directory import (
    METADATA,
    AnotherModelError,
    CheckpointError,
    DamagedCheckpointError,
    checkpoint_path,
    find_latest,
)
from trainer.checkpoint.foreign import foreign_format
from trainer.checkpoint.hub_weights import check_same_family_model, is_published, read_published
from trainer.checkpoint.load import read_training_state, read_weights, resume_optimizer
from trainer.checkpoint.metadata import CheckpointMetadata, load_metadata
from trainer.config.errors import ConfigError
from trainer.config.foreign_formats import ForeignFormat
from trainer.config.sections.checkpoint import START_REMEDY
from trainer.config.sections.model import ModelConfig
from trainer.config.sections.scales import logits_divisor, score_scale
from trainer.distributed.collectives import any_rank, first_text, from_first_rank, max_over_ranks
from trainer.families.catalogue import TUNABLE
from trainer.families.gguf.header import is_gguf
from trainer.hub.gguf_file import GgufFile
from trainer.hub.side_files import SIDE_FOLDER, copy_side_files
from trainer.process.failure import PeerFailedError

if TYPE_CHECKING:
    from trainer.config.records.saved_progress import SavedProgress
    from trainer.config.sections.checkpoint import CheckpointConfig
    from trainer.config.sections.hooks import HooksConfig
    from trainer.config.train_config import TrainConfig
    from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
    from trainer.parallel_model import ParallelModel
    from trainer.process.progress import TrainingProgress

OTHER_KERNELS = "kernels have changed since the checkpoint"
"""Start of the report of rank 0."""
_NOTHING, _OWN, _START_POINT, _PUBLISHED, _FAILED = range(5)

# Keys of the model section that no tensor's shape reveals.
_ARCHITECTURE_KEYS = (
    "num_attention_heads",
    "num_query_groups",
    "position_embedding_type",
    "rotary_percent",
    "position_embedding_offset",
    "embedding_scale",
    "residual_multiplier",
    "mup_base_hidden_size",
    "logits_scaling",
    "softmax_scale",
    "no_rope_freq",
    "norm_placement",
    "apply_layernorm_1p",
    "parallel_residual",
    "rotary_interleaved",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "swiglu",
    "openai_gelu",
    "squared_relu",
    "activation_func",
    "gated_linear_unit",
    "activation_clamp",
    "activation_alpha",
    "final_logit_softcapping",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_router_norm_topk_prob",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_group_score",
)


def check_start_point(config: CheckpointConfig, save: Path | None) -> None:
    """Reject a start point that is missing or indistinguishable from own checkpoints, and a folder of another program.

    A run that has checkpoints of its own goes on from them, so that its start point may be gone.

    Raises:
        ConfigError: names the key.
    """
    target = foreign_format(save) if save is not None else None
    if target is not None:
        raise ConfigError("checkpoint.save", f"{save} {target.problem_of_target}")
    if config.load is None:
        return
    load = Path(config.load).expanduser()
    is_same = save is not None and load.resolve() == save.resolve()
    # Two names of one folder; trainer.planning.checkpoint_checks refuses one name.
    if is_same and config.part_left_out is not None:
        raise ConfigError(
            "checkpoint.save",
            f"{save} is also checkpoint.load, of which {config.part_left_out} takes a part only, so that an attempt "
            "could not tell the start from its own checkpoints; choose another folder to save in",
        )
    has_own = save is not None and find_latest(save)[0] is not None
    foreign = foreign_format(load)
    if has_own or foreign is ForeignFormat.HUGGING_FACE or is_gguf(load):
        return
    if foreign is not None:
        raise ConfigError("checkpoint.load", f"{load} {foreign.problem}")
    if (load / METADATA).is_file():
        raise ConfigError(
            "checkpoint.load", f"{load} is a single checkpoint; name the folder that contains it, {load.parent}"
        )
    # Megatron's scripts name one folder for both from the first start on, when it is still empty.
    if not is_same and find_latest(load)[0] is None:
        raise ConfigError("checkpoint.load", f"{load} holds no checkpoint; {START_REMEDY}")


def restore(
    config: TrainConfig,
    save: Path | None,
    model: ParallelModel,
    optimizer: MixedPrecisionOptimizer,
    progress: TrainingProgress,
    device: torch.device,
    kernels: Mapping[str, str] | None = None,
    saved: SavedProgress | None = None,
) -> Path | None:
    """Load the run's start checkpoint; returns its path, None without one.

    The run's own checkpoints under ``save`` always take precedence, and load completely; finetune and no_load_* concern
    the start point only. A Hugging Face folder, a GGUF file, or a checkpoint that was imported, gives only the weights.
    Collective: all ranks; rank 0 chooses, so that ranks cannot choose differently on a file system that shows them
    different files.

    Args:
        config: the run's config.
        save: folder of the run's own checkpoints; None: nothing is saved.
        model: receives the weights.
        optimizer: receives its state.
        progress: receives the progress of the run.
        device: device of the messages between ranks.
        kernels: operation -> label of its backend. Rank 0 reports the differences from a run that is resumed.
        saved: progress of this run that lies in a checkpoint, so that it must continue one of its own.

    Raises:
        CheckpointError: the chosen checkpoint cannot be read or has another model, or ``saved`` is missing.
        PeerFailedError: another rank met such an error.
    """
    checkpoint = config.checkpoint
    load = Path(checkpoint.load).expanduser() if checkpoint.load else None
    roots = {_OWN: save, _START_POINT: load} if saved is None else {_OWN: save}
    read = _read_first_sound(roots, config, model, optimizer, device)
    if read is None:
        _check_nothing_is_saved(saved, save)
        return None
    source, path, metadata, weights_only = read
    problem: Exception | None = None
    try:
        _keep_side_files(path, save, model.mesh.rank)
    except Exception as error:
        problem = error
    # Every kind of error, and before any rank waits for the others' weights: it would wait until its timeout.
    if any_rank(problem is not None, device):
        raise problem or PeerFailedError(f"{path} cannot be read: another rank reports the cause")
    if weights_only:
        optimizer.adopt_weights()
        model.gradients.weights_changed()
        model.gradients.wait_for_weights()
    elif metadata is not None:
        resume_optimizer(metadata, model, optimizer)
    if model.mesh.rank == 0 and source == _OWN and metadata is not None:
        _report_other_kernels(metadata.kernels, kernels or {})
        _report_other_hooks(metadata.config.get("hooks", {}), config.hooks)
    if metadata is None or (source == _START_POINT and (checkpoint.finetune or metadata.is_imported)):
        return path
    _load_progress(progress, metadata, path, keeps_seed=source == _START_POINT and checkpoint.no_load_rng)
    return path


def _load_progress(progress: TrainingProgress, metadata: CheckpointMetadata, path: Path, *, keeps_seed: bool) -> None:
    seed = progress.seed
    try:
        progress.load(metadata.progress)
    except KeyError as error:
        raise CheckpointError(f"{path / METADATA}: progress has no {error}") from None
    if keeps_seed:
        progress.seed = seed


def _check_nothing_is_saved(saved: SavedProgress | None, save: Path | None) -> None:
    """Refuse a start from the beginning after ``saved`` progress, whose checkpoints have just gone."""
    if saved is not None:
        raise CheckpointError(saved.missing(str(save), "holds no checkpoint"))


def _report_other_kernels(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Print the operations whose backend has changed since the checkpoint, with the consequence."""
    changed: dict[tuple[str, str], list[str]] = {}
    for name in before.keys() & now.keys():
        if before[name] != now[name]:
            changed.setdefault((before[name], now[name]), []).append(name)
    if changed:
        parts = [f"{', '.join(sorted(names))}: {new} instead of {old}" for (old, new), names in sorted(changed.items())]
        print(
            f"{OTHER_KERNELS}: {'; '.join(parts)}; results differ by rounding from those of an uninterrupted run",
            flush=True,
        )


def _report_other_hooks(before: Mapping[str, Any], now: HooksConfig) -> None:
    """Print the user's functions and their settings that have changed since the checkpoint."""
    changed = [
        f"hooks.{key}: {value!r} instead of {before.get(key, default)!r}"
        for key, value, default in now.of_results()
        if value != before.get(key, default)
    ]
    if changed:
        print(
            f"hooks have changed since the checkpoint: {'; '.join(changed)}; the run goes on with the new ones",
            flush=True,
        )


class _Read(NamedTuple):
    """The checkpoint that all ranks have read: its source, its path, its metadata, and if only its weights were read.

    A published model has no metadata.
    """

    source: int
    path: Path
    metadata: CheckpointMetadata | None
    weights_only: bool


def _read_first_sound(
    roots: dict[int, Path | None],
    config: TrainConfig,
    model: ParallelModel,
    optimizer: MixedPrecisionOptimizer,
    device: torch.device,
) -> _Read | None:
    """Read the newest checkpoint that no rank finds damaged; None without any. Collective: all ranks.

    What a rank has read of a damaged checkpoint is overwritten by the next.

    Raises:
        CheckpointError: all checkpoints are damaged, or the chosen one has another model.
        PeerFailedError: another rank met such an error.
    """
    rejected: list[Path] = []
    rank = model.mesh.rank
    while True:
        source, path = _agree_on_checkpoint(roots, rejected, rank, device)
        if path is None:
            return None
        metadata: CheckpointMetadata | None = None
        weights_only = True
        problem: Exception | None = None
        try:
            if source == _PUBLISHED:
                may_differ = TUNABLE if config.checkpoint.finetune else ()
                draws = config.checkpoint.draw_missing_heads
                read_published(path, config.model, model, may_differ, may_lack_heads=draws)
            else:
                metadata, weights_only = _read_checkpoint(path, config, model, optimizer, is_own=source == _OWN)
        except Exception as error:
            # Every kind of error, and before any rank waits for the others' weights: it would wait until its timeout.
            problem = error
        is_damage = isinstance(problem, DamagedCheckpointError)
        worst = max_over_ranks([0.0 if problem is None else 1.0 if is_damage else 2.0], device)[0]
        if worst == 2.0:
            if problem is not None and not is_damage:
                raise problem
            raise PeerFailedError(f"{path} cannot be read: another rank reports the cause")
        if worst == 0.0:
            if rank == 0 and metadata is not None and not metadata.checksums:
                print(f"{path} is of a release without checksums; its contents were not verified", flush=True)
            return _Read(source, path, metadata, weights_only)
        sentence = first_text(str(problem) if problem is not None else "", device)
        if rank == 0:
            print(sentence, flush=True)
        rejected.append(path)


def _read_checkpoint(
    path: Path, config: TrainConfig, model: ParallelModel, optimizer: MixedPrecisionOptimizer, *, is_own: bool
) -> tuple[CheckpointMetadata, bool]:
    """Fill this rank's shards; returns the metadata, and True if only the weights were read."""
    metadata, checkpoint = load_metadata(path), config.checkpoint
    weights_only = checkpoint.finetune or checkpoint.no_load_optim or metadata.is_imported
    if is_own:
        weights_only = checkpoint.no_save_optim
    _check_same_architecture(path, metadata, config)
    if weights_only:
        read_weights(path, model)
    else:
        read_training_state(path, model, optimizer)
    return metadata, weights_only


def _keep_side_files(path: Path, save: Path | None, rank: int) -> None:
    """Copy tokenizer and config.json of the model beside the run's checkpoints, for exports; on rank 0.

    Raises:
        CheckpointError: a file cannot be copied.
    """
    if save is None or rank != 0:
        return
    target = save / SIDE_FOLDER
    source = path if is_published(path) else path.parent / SIDE_FOLDER
    is_file = is_gguf(path)
    if not (is_file or source.is_dir()) or source.resolve() == target.resolve():
        return
    try:
        if is_file:
            with GgufFile(path) as file:
                file.write_side_files(target)
        else:
            copy_side_files(source, target)
    except OSError as error:
        raise CheckpointError(
            f"{target}: the tokenizer files of {source} cannot be copied to it: {error.strerror or error}"
        ) from error


def _check_same_architecture(checkpoint: Path, metadata: CheckpointMetadata, config: TrainConfig) -> None:
    """Reject a config that makes another model of weights with equal shapes."""
    stored, model = metadata.config.get("model"), config.model
    if not stored:
        return
    if metadata.is_imported:
        may_differ = TUNABLE if config.checkpoint.finetune else ()
        check_same_family_model(checkpoint, ModelConfig(**stored), model, may_differ)
        return
    # A key that was unknown when the checkpoint was written has kept its default behaviour since.
    defaults = {key: field.default for key, field in type(model).model_fields.items() if not field.is_required()}
    stored = defaults | stored
    stored["num_query_groups"] = stored["num_query_groups"] or stored.get("num_attention_heads")
    stored |= _resolved(ModelConfig.model_construct(**stored))
    present = {**model.model_dump(), "num_query_groups": model.query_groups, **_resolved(model)}
    for key in _ARCHITECTURE_KEYS if config.checkpoint.finetune else (*_ARCHITECTURE_KEYS, *sorted(TUNABLE)):
        if key in stored and stored[key] != present[key]:
            remedy = ", or take only the weights with checkpoint.finetune" if key in TUNABLE else ""
            raise AnotherModelError(
                f"{checkpoint} was written with model.{key} {stored[key]}, but this run has {present[key]}, which "
                f"makes another model of the same weights; set it to {stored[key]}{remedy}"
            )


def _resolved(model: ModelConfig) -> dict[str, Any]:
    return {
        "softmax_scale": model.softmax_scale if model.multi_latent_attention else score_scale(model),
        "logits_scaling": logits_divisor(model),
        "moe_router_score_function": model.router_score_function,
        "moe_router_pre_softmax": model.router_pre_softmax,
    }


def _agree_on_checkpoint(
    roots: dict[int, Path | None], rejected: Collection[Path], rank: int, device: torch.device
) -> tuple[int, Path | None]:
    choice = [_NOTHING, 0]
    problem: Exception | None = None
    if rank == 0:
        try:
            choice = _choose(roots, rejected)
        except Exception as error:
            choice, problem = [_FAILED, 0], error
    source, iteration = from_first_rank(choice, device)
    if isinstance(problem, OSError):
        raise CheckpointError(str(problem)) from problem
    if problem is not None:
        raise problem
    if source == _FAILED:
        raise PeerFailedError("rank 0 found no readable checkpoint and reports the cause")
    if source == _PUBLISHED:
        return source, roots[_START_POINT]
    root = roots.get(source)
    return source, None if root is None else checkpoint_path(root, iteration)


def _choose(roots: dict[int, Path | None], rejected: Collection[Path]) -> list[int]:
    for source, root in roots.items():
        path, note = find_latest(root, rejected) if root is not None else (None, None)
        if note:
            print(note, flush=True)
        if path is not None:
            return [source, int(path.name.removeprefix("iter_"))]
        if source == _START_POINT and root is not None and is_published(root):
            return [_PUBLISHED, 0]
    return [_NOTHING, 0]

"""Loading a checkpoint into a model of any layout (resharding)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint.directory import AnotherModelError
from trainer.checkpoint.fill import fill_shard
from trainer.checkpoint.metadata import CheckpointMetadata, load_metadata
from trainer.checkpoint.saving.staging import stored_shape
from trainer.checkpoint.shards import DTYPE_NAMES
from trainer.checkpoint.stored_tensors import StoredTensors
from trainer.optimizer.split_master import Master

if TYPE_CHECKING:
    from trainer.data_parallel.parameter_shards import StoredShard
    from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
    from trainer.parallel_model import ParallelModel

OTHER_DTYPES = "dtypes of the optimizer state have changed since the checkpoint"
"""Start of the report of rank 0."""


def load_weights(checkpoint: Path, model: ParallelModel) -> CheckpointMetadata:
    """Fill the model's parameters, whatever the layouts and vocabulary padding of model and checkpoint.

    Collective if the model's gradient store is sharded; else each rank loads alone.

    Raises:
        CheckpointError: the files cannot be read.
        AnotherModelError: the files hold another model.
    """
    metadata = read_weights(checkpoint, model)
    model.gradients.weights_changed()
    model.gradients.wait_for_weights()
    return metadata


def read_weights(checkpoint: Path, model: ParallelModel) -> CheckpointMetadata:
    """Fill only this rank's shards of the weights. Each rank reads alone.

    Raises:
        CheckpointError: as load_weights.
    """
    metadata = load_metadata(checkpoint)
    check_same_model(checkpoint, _shapes(metadata), model)
    with StoredTensors(checkpoint, metadata) as stored:
        for shard in model.stored_shards:
            _fill(model, stored, "model", shard, shard.weight)
    return metadata


def read_training_state(
    checkpoint: Path, model: ParallelModel, optimizer: MixedPrecisionOptimizer
) -> CheckpointMetadata:
    """Fill this rank's masters and moments, and weights that are their own masters.

    Each rank reads alone.

    Raises:
        CheckpointError: the files cannot be read.
        AnotherModelError: the files hold another model, or no state of this kind of optimizer.
    """
    metadata, requested = load_metadata(checkpoint), optimizer.tensors()
    check_same_model(checkpoint, _shapes(metadata), model)
    moments = requested.keys() - {"master"}
    if metadata.optimizer is None or not moments <= metadata.tensors.keys():
        has = metadata.optimizer["name"] if metadata.optimizer else "none"
        raise AnotherModelError(
            f"{checkpoint} holds optimizer state of {has}, but this run needs {', '.join(sorted(moments))}; "
            "to continue from its weights alone, name its folder as checkpoint.load with no_load_optim: true, and save "
            "to another folder"
        )
    masters, stored_masters = requested.get("master", {}), metadata.tensors.get("master", {})
    with StoredTensors(checkpoint, metadata) as stored:
        for shard in model.gradients.parameter_shards:
            # A weight in fp32 is its own master, in the files as in memory. 16-bit weights are copies of their masters.
            kind = "master" if shard.name in stored_masters else "model"
            _fill(model, stored, kind, shard, masters.get(shard.name, shard.weight))
            for moment in moments:
                _fill(model, stored, moment, shard, requested[moment][shard.name])
        for buffer in model.buffer_shards:
            _fill(model, stored, "model", buffer, buffer.weight)
    return metadata


def resume_optimizer(metadata: CheckpointMetadata, model: ParallelModel, optimizer: MixedPrecisionOptimizer) -> None:
    """Set the counters, and bring the loaded state to the weights of all ranks.

    Collective: all ranks.
    """
    assert metadata.optimizer is not None
    if model.mesh.rank == 0:
        _report_other_dtypes(metadata, optimizer)
    optimizer.restore(int(metadata.optimizer["steps"]), metadata.loss_scaler)
    model.gradients.wait_for_weights()


def _report_other_dtypes(metadata: CheckpointMetadata, optimizer: MixedPrecisionOptimizer) -> None:
    """Print the kinds of state that this run stores in another dtype than the checkpoint, with the consequence."""
    changed = []
    for kind, named in optimizer.tensors().items():
        dtypes = {
            (metadata.tensors[kind][name].dtype, DTYPE_NAMES[tensor.dtype])
            for name, tensor in named.items()
            if name in metadata.tensors.get(kind, {})
        }
        changed += [f"{kind}: {new} instead of {old}" for old, new in sorted(dtypes) if old != new]
    if changed:
        print(
            f"{OTHER_DTYPES}: {'; '.join(changed)}; results differ by rounding from those of an uninterrupted run",
            flush=True,
        )


def _shapes(metadata: CheckpointMetadata) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in metadata.tensors["model"].items()}


def check_same_model(checkpoint: Path, stored: Mapping[str, tuple[int, ...]], model: ParallelModel) -> None:
    """Check that the stored shapes, by global name, are those of this rank's part of the model.

    Raises:
        AnotherModelError: a tensor is missing, left over, or has another shape.
    """
    for name, layout in model.layouts.items():
        if name not in stored:
            raise AnotherModelError(
                f"{checkpoint} has no tensor {name}, which this model needs; the model section of the config differs "
                "from that of the run that wrote the checkpoint"
            )
        if stored[name] != stored_shape(layout):
            raise AnotherModelError(
                f"{checkpoint} has {name} of shape {list(stored[name])}, but this model needs "
                f"{list(stored_shape(layout))}; the model section, the vocabulary or training.seq_length differs from "
                "that of the run that wrote the checkpoint"
            )
    surplus = next((name for name in stored if _belongs_here(name, model) and name not in model.layouts), None)
    if surplus is not None:
        raise AnotherModelError(
            f"{checkpoint} holds the tensor {surplus}, which this model does not have; the model section of the config "
            "differs from that of the run that wrote the checkpoint"
        )


def _belongs_here(name: str, model: ParallelModel) -> bool:
    """True if this rank's stage would hold the tensor.

    Surplus layers belong to all ranks.
    """
    mesh, (part, number) = model.mesh, name.split(".")[:2]
    if part == "embedding":
        return mesh.is_first_stage
    if part != "layers":
        return mesh.computes_loss
    own = {int(known.split(".")[1]) for known in model.layouts if known.startswith("layers.")}
    return int(number) in own or int(number) >= model.num_layers


def _fill(model: ParallelModel, stored: StoredTensors, kind: str, shard: StoredShard, target: Master) -> None:
    """Copy this rank's shard of a global tensor into ``target``, 1-D.

    Raises:
        CheckpointError: names the tensor and the checkpoint.
    """
    what = stored.describe(kind, shard.name)
    fill_shard(what, model, shard, target, partial(stored.blocks, kind, shard.name))

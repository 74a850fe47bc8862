"""One rank's part of a checkpoint: the tensors that it owns and their places, at one iteration."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.metadata import StoredPart, stored_key
from trainer.checkpoint.saving.snapshot import Snapshot
from trainer.checkpoint.shards import DTYPE_NAMES
from trainer.data_parallel.parameter_shards import StoredShard, is_first_copy
from trainer.optimizer.split_master import Master

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig
    from trainer.distributed.mesh import ParallelMesh
    from trainer.model.sharding import ParameterLayout
    from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
    from trainer.parallel_model import ParallelModel
    from trainer.process.progress import TrainingProgress


@dataclass(frozen=True)
class StagedSave:
    """One rank's part of a checkpoint.

    Attributes:
        mesh: of the job, as this rank sees it.
        progress: counters of the run, as plain values.
        layout: sizes of the axes and the divisions of the model, for the metadata.
        optimizer: its name and number of steps; None: the checkpoint has no optimizer state.
        loss_scaler: its state; None without optimizer state.
        files: name of a rank file -> key of a part -> its tensor, or a master that is joined when it
            is written. Live views without a snapshot.
        index: kind -> global name -> shape, dtype and parts.
        snapshot: fills ``files``; None: they are the state itself.
        seconds: that the training took to collect this; 0 without a snapshot.
    """

    mesh: ParallelMesh
    progress: Mapping[str, Any]
    layout: Mapping[str, Any]
    optimizer: Mapping[str, Any] | None
    loss_scaler: Mapping[str, Any] | None
    files: Mapping[str, Mapping[str, Master]]
    index: Mapping[str, Mapping[str, Any]]
    snapshot: Snapshot | None = None
    seconds: float = 0.0

    @property
    def iteration(self) -> int:
        """The iteration whose state it is."""
        return int(self.progress["iteration"])

    @property
    def waited_s(self) -> float:
        """Time in seconds for which the training stood: 0 without a snapshot, whose copies are made."""
        return self.seconds + (0.0 if self.snapshot is None else self.snapshot.waited_s)

    def copy(self) -> None:
        """Make the copies, if there is a snapshot. In any thread."""
        if self.snapshot is not None:
            self.snapshot.make()

    def guarded_by(self, optimizer: MixedPrecisionOptimizer, began: float) -> StagedSave:
        """This save, with its time since ``began``: ``optimizer`` changes nothing before the copies are made."""
        assert self.snapshot is not None
        optimizer.call_before_change(self.snapshot.before_change)
        return replace(self, seconds=time.perf_counter() - began)


def stage(
    model: ParallelModel,
    optimizer: MixedPrecisionOptimizer,
    config: TrainConfig,
    progress: TrainingProgress,
) -> StagedSave:
    """Collect what this rank writes, between two steps. The tensors are live views: the next step changes them.

    Collective: all ranks, since weights may be on their way.
    """
    model.gradients.wait_for_weights()
    mesh, with_optimizer = model.mesh, not config.checkpoint.no_save_optim
    files, index = _owned_parts(model, optimizer.tensors() if with_optimizer else {})
    return StagedSave(
        mesh=mesh,
        progress=progress.state(),
        layout={
            **{axis: getattr(mesh, axis) for axis in ("tp", "pp", "dp", "cp", "ep")},
            "zero_stage": config.parallel.zero_stage,
            "pipeline_schedule": model.schedule,
        },
        optimizer={"name": config.optimizer.optimizer, "steps": optimizer.steps} if with_optimizer else None,
        loss_scaler=optimizer.loss_scaler.state() if with_optimizer else None,
        files=files,
        index=index,
    )


def _owned_parts(
    model: ParallelModel, of_optimizer: Mapping[str, Mapping[str, Master]]
) -> tuple[dict[str, dict[str, Master]], dict[str, dict[str, Any]]]:
    """Files and index of this rank."""
    shards = {shard.name: shard for shard in model.stored_shards if _is_written(shard, model)}
    kinds: dict[str, Mapping[str, Master]] = {
        "model": {name: shard.weight for name, shard in shards.items()},
        **of_optimizer,
    }
    files: dict[str, dict[str, Master]] = {}
    index: dict[str, dict[str, Any]] = {}
    for kind, tensors in kinds.items():
        file = f"{'model' if kind == 'model' else 'optimizer'}_rank{model.mesh.rank:05d}.safetensors"
        for name, shard in shards.items():
            if name not in tensors:
                continue
            layout, parts = model.layouts[name], []
            for part, tensor in _parts(layout, model, shard, tensors[name], file, stored_key(kind, name)):
                files.setdefault(file, {})[part.key] = tensor
                parts.append(part)
            if parts:
                values = {"shape": stored_shape(layout), "dtype": DTYPE_NAMES[tensors[name].dtype], "parts": parts}
                index.setdefault(kind, {})[name] = values
    return files, index


def stored_shape(layout: ParameterLayout) -> tuple[int, ...]:
    """Shape of the global tensor without vocabulary padding."""
    return (layout.valid_rows or layout.global_shape[0], *layout.global_shape[1:])


def _is_written(shard: StoredShard, model: ParallelModel) -> bool:
    is_sharded = model.gradients.is_sharded and shard.name not in model.buffers
    return is_first_copy(model.layouts[shard.name], model.mesh, is_sharded)


def _parts(
    layout: ParameterLayout, model: ParallelModel, shard: StoredShard, flat: Master, file: str, key: str
) -> Iterator[tuple[StoredPart, Master]]:
    """The parts of a tensor that this rank stores.

    The tensor has one element per element of ``shard``. No shard box contains padding.
    """
    number = 0
    for box in layout.boxes(model.mesh):
        low, high = max(shard.start, box.start), min(shard.stop, box.stop)
        if not box.is_owned or low >= high:
            continue
        tensor = flat[low - shard.start : high - shard.start]
        if (low, high) == (box.start, box.stop):
            tensor = tensor.view(box.shape)
        name = f"{key}#{number}" if number else key
        number += 1
        yield StoredPart(file, name, box.offset, box.shape, low - box.start, high - box.start), tensor

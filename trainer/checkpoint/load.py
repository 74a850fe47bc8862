"""Loading a checkpoint into a model of any layout (resharding)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.checkpoint.directory import AnotherModelError, CheckpointError
from trainer.checkpoint.metadata import CheckpointMetadata, StoredPart, StoredTensor, load_metadata, stored_key
from trainer.checkpoint.regions import Region, overlap, regions_of_flat_range
from trainer.checkpoint.save import stored_shape

if TYPE_CHECKING:
    from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
    from trainer.parallel_model import ParallelModel


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


def load_training_state(
    checkpoint: Path, model: ParallelModel, optimizer: MixedPrecisionOptimizer
) -> CheckpointMetadata:
    """Fill the parameters, masters and moments, and set the optimizer's counters.

    Collective if the model's gradient store is sharded; else each rank loads alone.

    Raises:
        CheckpointError: the files cannot be read.
        AnotherModelError: the files hold another model, or no state of this kind of optimizer.
    """
    metadata = read_training_state(checkpoint, model, optimizer)
    resume_optimizer(metadata, model, optimizer)
    return metadata


def read_weights(checkpoint: Path, model: ParallelModel) -> CheckpointMetadata:
    """Fill only this rank's shards of the weights. Each rank reads alone.

    Raises:
        CheckpointError: as load_weights.
    """
    metadata = load_metadata(checkpoint)
    _check_same_model(checkpoint, metadata.tensors["model"], model)
    with _Reader(checkpoint, model) as reader:
        for shard in model.gradients.parameter_shards:
            reader.fill(metadata, "model", shard.name, shard.weight)
    return metadata


def read_training_state(
    checkpoint: Path, model: ParallelModel, optimizer: MixedPrecisionOptimizer
) -> CheckpointMetadata:
    """Fill this rank's masters and moments, and weights that are their own masters.

    Each rank reads alone.

    Raises:
        CheckpointError: as load_training_state.
    """
    metadata, requested = load_metadata(checkpoint), optimizer.tensors()
    _check_same_model(checkpoint, metadata.tensors["model"], model)
    moments = requested.keys() - {"master"}
    if metadata.optimizer is None or not moments <= metadata.tensors.keys():
        has = metadata.optimizer["name"] if metadata.optimizer else "none"
        raise AnotherModelError(
            f"{checkpoint} holds optimizer state of {has}, but this run needs {', '.join(sorted(moments))}; "
            "to continue from its weights alone, name its folder as checkpoint.load with no_load_optim: true, and save "
            "to another folder"
        )
    masters, stored_masters = requested.get("master", {}), metadata.tensors.get("master", {})
    with _Reader(checkpoint, model) as reader:
        for shard in model.gradients.parameter_shards:
            # A weight in fp32 is its own master, in the files as in memory. 16-bit weights are copies of their masters.
            kind = "master" if shard.name in stored_masters else "model"
            reader.fill(metadata, kind, shard.name, masters.get(shard.name, shard.weight))
            for moment in moments:
                reader.fill(metadata, moment, shard.name, requested[moment][shard.name])
    return metadata


def resume_optimizer(metadata: CheckpointMetadata, model: ParallelModel, optimizer: MixedPrecisionOptimizer) -> None:
    """Set the counters, and bring the loaded state to the weights of all ranks.

    Collective: all ranks.
    """
    assert metadata.optimizer is not None
    optimizer.restore(int(metadata.optimizer["steps"]), metadata.loss_scaler)
    model.gradients.wait_for_weights()


def _check_same_model(checkpoint: Path, stored: Mapping[str, StoredTensor], model: ParallelModel) -> None:
    for name, layout in model.layouts.items():
        if name not in stored:
            raise AnotherModelError(
                f"{checkpoint} has no tensor {name}, which this model needs; the model section of the config differs "
                "from that of the run that wrote the checkpoint"
            )
        if stored[name].shape != stored_shape(layout):
            raise AnotherModelError(
                f"{checkpoint} has {name} of shape {list(stored[name].shape)}, but this model needs "
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


class _Reader(ExitStack):
    """Memory-mapped reads from the tensors of one checkpoint; opens every file once."""

    def __init__(self, checkpoint: Path, model: ParallelModel) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._model = model
        self._parameter_shards = {shard.name: shard for shard in model.gradients.parameter_shards}
        self._files: dict[str, Any] = {}

    @torch.no_grad()
    def fill(self, metadata: CheckpointMetadata, kind: str, name: str, target: Tensor) -> None:
        """Copy this rank's shard of a global tensor into ``target``, 1-D.

        Vocabulary padding becomes zeros.

        Raises:
            CheckpointError: names the tensor and the checkpoint.
        """
        what = f"{self._checkpoint}: {stored_key(kind, name)}"
        try:
            stored, shard, end = _Parts(metadata.tensors[kind][name]), self._parameter_shards[name], 0
            for box in self._model.layouts[name].boxes(self._model.mesh):
                low, high = max(shard.start, box.start), min(shard.stop, box.stop)
                if low >= high:
                    continue
                target[end : low - shard.start].zero_()
                end = high - shard.start
                for region in regions_of_flat_range(box.offset, box.shape, low - box.start, high - box.start):
                    first = box.start + region.start - shard.start
                    view = target[first : first + math.prod(region.shape)].view(region.shape)
                    self._fill_region(what, stored, region, view)
            target[end:].zero_()
        except (OSError, SafetensorError, KeyError) as error:
            raise CheckpointError(f"{what} cannot be read: {type(error).__name__}: {error}") from error

    def _fill_region(self, what: str, stored: _Parts, requested: Region, target: Tensor) -> None:
        """Copy a region of the global tensor from all parts that overlap with it."""
        found = 0
        # If one part has the whole region, counting elements is enough to detect gaps and overlaps.
        is_filled: Tensor | None = None
        for part in stored.near(requested):
            source: Tensor | None = None
            for region in regions_of_flat_range(part.offset, part.shape, part.start, part.stop):
                common = overlap(requested.offset, requested.shape, region.offset, region.shape)
                if common is None:
                    continue
                source = self._map(what, part) if source is None else source
                first = region.start - part.start
                block = source[first : first + math.prod(region.shape)].view(region.shape)
                _cut(target, requested.offset, *common).copy_(_cut(block, region.offset, *common))
                found += math.prod(common[1])
                if common[1] != requested.shape:
                    is_filled = torch.zeros(requested.shape, dtype=torch.bool) if is_filled is None else is_filled
                    _cut(is_filled, requested.offset, *common).fill_(True)
        filled = found if is_filled is None else int(is_filled.sum())
        if found != target.numel() or filled != target.numel():
            problem = "overlaps itself" if found > filled or found > target.numel() else "is incomplete"
            raise CheckpointError(
                f"{what} {problem}: {found} elements, {filled} of them distinct, instead of {target.numel()}; the "
                "checkpoint is damaged, choose another"
            )

    def _map(self, what: str, part: StoredPart) -> Tensor:
        """The flattened elements of a part in mapped memory.

        The system reads only the pages in use.
        """
        if part.file not in self._files:
            opened = safe_open(str(self._checkpoint / part.file), framework="pt", device="cpu")
            self._files[part.file] = self.enter_context(opened)
        tensor: Tensor = self._files[part.file].get_tensor(part.key)
        if tensor.numel() != part.stop - part.start:
            raise CheckpointError(
                f"{what} has {tensor.numel()} elements in {part.file}, but {part.stop - part.start} in metadata.json; "
                "the checkpoint is damaged, choose another"
            )
        return tensor.view(-1)


class _Parts:
    """The parts of one tensor, indexed by their rows of dim 0.

    A rank needs a few parts out of thousands.
    """

    def __init__(self, stored: StoredTensor) -> None:
        spans = [(*_rows(part), part) for part in stored.parts]
        spans.sort(key=lambda span: span[0])
        self._parts = [part for _, _, part in spans]
        self._firsts = [first for first, _, _ in spans]
        # Largest stop so far: no part before the first place where this exceeds a row reaches that row.
        self._stops = list(accumulate((stop for _, stop, _ in spans), max))

    def near(self, requested: Region) -> list[StoredPart]:
        """All parts that may have elements in a region of the global tensor."""
        first, stop = requested.offset[0], requested.offset[0] + requested.shape[0]
        return self._parts[bisect_right(self._stops, first) : bisect_left(self._firsts, stop)]


def _rows(part: StoredPart) -> tuple[int, int]:
    """First row of dim 0 in a part, and the row after the last.

    Rows are counted in the global tensor.
    """
    row = math.prod(part.shape[1:])
    return part.offset[0] + part.start // row, part.offset[0] + -(-part.stop // row)


def _cut(tensor: Tensor, origin: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """The box at ``offset`` of a global tensor, cut from ``tensor``.

    ``tensor`` is the box at ``origin``.
    """
    for dim, (first, length) in enumerate(zip(offset, shape, strict=True)):
        tensor = tensor.narrow(dim, first - origin[dim], length)
    return tensor

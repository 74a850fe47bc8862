"""Reading a checkpoint into a model of any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.checkpoint.directory import CheckpointError
from trainer.checkpoint.metadata import CheckpointMetadata, StoredTensor, load_metadata
from trainer.checkpoint.save import local_range, stored_shape

if TYPE_CHECKING:
    from trainer.mesh import ParallelMesh
    from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
    from trainer.parameters import ParameterLayout
    from trainer.train_state import ParallelModel


def load_weights(checkpoint: Path, model: ParallelModel) -> CheckpointMetadata:
    """Fill the model's parameters, whatever the tp, pp, dp and vocabulary padding of model and checkpoint.

    No rank needs another; each reads only what it holds.

    Raises:
        CheckpointError: the files cannot be read, or hold another model.
    """
    metadata = load_metadata(checkpoint)
    _check_same_model(checkpoint, metadata.tensors["model"], model)
    weights = {name: parameter.detach() for name, parameter in model.parameters.items()}
    with _Reader(checkpoint) as reader:
        reader.fill("model", metadata.tensors["model"], weights, model)
    return metadata


def load_training_state(
    checkpoint: Path, model: ParallelModel, optimizer: MixedPrecisionOptimizer
) -> CheckpointMetadata:
    """Fill the parameters and the optimizer's masters and moments; the optimizer then stands where the run stood.

    Raises:
        CheckpointError: as load_weights; or the checkpoint holds no state of this kind of optimizer.
    """
    metadata = load_weights(checkpoint, model)
    wanted = {
        kind: {name: tensor.view(model.parameters[name].shape) for name, tensor in tensors.items()}
        for kind, tensors in optimizer.tensors().items()
    }
    moments = wanted.keys() - {"master"}
    if metadata.optimizer is None or not moments <= metadata.tensors.keys():
        has = metadata.optimizer["name"] if metadata.optimizer else "none"
        raise CheckpointError(
            f"{checkpoint} holds the optimizer state of {has}, not what this run needs ({', '.join(sorted(moments))}); "
            "to go on from its weights alone, name its folder as checkpoint.load with no_load_optim: true, and save "
            "elsewhere"
        )
    with _Reader(checkpoint) as reader:
        for kind, tensors in wanted.items():
            # A run in fp32 is its own master, so that its weights are what 16-bit training goes on from.
            source = kind if kind in metadata.tensors else "model"
            reader.fill(source, metadata.tensors[source], tensors, model)
        if "master" in metadata.tensors and "master" not in wanted:
            weights = {name: parameter.detach() for name, parameter in model.parameters.items()}
            reader.fill("master", metadata.tensors["master"], weights, model)
    optimizer.restore(int(metadata.optimizer["steps"]), metadata.loss_scaler)
    return metadata


def _check_same_model(checkpoint: Path, stored: Mapping[str, StoredTensor], model: ParallelModel) -> None:
    for name, layout in model.layouts.items():
        if name not in stored:
            raise CheckpointError(
                f"{checkpoint} has no tensor {name}, which this model needs; the model section of the config differs "
                "from that of the run that wrote it"
            )
        tensor = stored[name]
        if tensor.shape != stored_shape(layout) or tensor.dim != layout.tp_dim:
            raise CheckpointError(
                f"{checkpoint} has {name} of shape {list(tensor.shape)}, this model {list(stored_shape(layout))}; the "
                "model section or the vocabulary of the config differs from that of the run that wrote it"
            )
    _check_nothing_left(checkpoint, stored, model)


def _check_nothing_left(checkpoint: Path, stored: Mapping[str, StoredTensor], model: ParallelModel) -> None:
    surplus = next((name for name in stored if _belongs_here(name, model) and name not in model.layouts), None)
    if surplus is not None:
        raise CheckpointError(
            f"{checkpoint} holds the tensor {surplus}, which this model has not; the model section of the config "
            "differs from that of the run that wrote it"
        )


def _belongs_here(name: str, model: ParallelModel) -> bool:
    """Whether this rank's stage is the one to hold a tensor, if the model has it: layers too many are the last's."""
    mesh, (part, number) = model.mesh, name.split(".")[:2]
    if part == "embedding":
        return mesh.is_first_stage
    if part != "layers":
        return mesh.computes_loss
    own = {int(known.split(".")[1]) for known in model.layouts if known.startswith("layers.")}
    return int(number) in own or (mesh.computes_loss and int(number) > max(own))


class _Reader(ExitStack):
    """Slices of the tensors of one checkpoint, by memory map; every file is opened once."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._files: dict[str, Any] = {}

    @torch.no_grad()
    def fill(
        self, kind: str, stored: Mapping[str, StoredTensor], targets: Mapping[str, Tensor], model: ParallelModel
    ) -> None:
        """Copy this rank's part of each global tensor into ``targets``; vocabulary padding becomes zeros."""
        for name, target in targets.items():
            key = name if kind == "model" else f"{kind}.{name}"
            try:
                self._fill(key, stored[name], target, model.layouts[name], model.mesh)
            except (OSError, SafetensorError, KeyError) as error:
                raise CheckpointError(
                    f"{self._checkpoint}: {key} cannot be read: {type(error).__name__}: {error}"
                ) from error

    def _fill(
        self, key: str, stored: StoredTensor, target: Tensor, layout: ParameterLayout, mesh: ParallelMesh
    ) -> None:
        dim = layout.tp_dim if layout.tp_dim is not None else 0
        start, stop = local_range(layout, mesh)
        filled = start
        for shard in sorted(stored.shards, key=lambda shard: shard.start):
            low, high = max(start, shard.start), min(stop, shard.stop)
            if low < high:
                part = self._slice(shard.file, key)(dim, low - shard.start, high - shard.start)
                target.narrow(dim, low - start, high - low).copy_(part)
                filled += high - low
        if filled != stop:
            raise CheckpointError(
                f"{self._checkpoint}: {key} is incomplete: {filled - start} of {stop - start} entries"
            )
        target.narrow(dim, stop - start, target.shape[dim] - (stop - start)).zero_()

    def _slice(self, file: str, key: str) -> Callable[[int, int, int], Tensor]:
        if file not in self._files:
            opened = safe_open(str(self._checkpoint / file), framework="pt", device="cpu")
            self._files[file] = self.enter_context(opened)
        tensor = self._files[file].get_slice(key)

        def cut(dim: int, low: int, high: int) -> Tensor:
            part: Tensor = tensor[(slice(None),) * dim + (slice(low, high),)]
            return part

        return cut

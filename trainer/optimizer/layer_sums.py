"""Sums over the elements of each layer, with each element of the model counted once in every layout.

A layer is ``layers.5`` of ``layers.5.mlp.fc1.weight``, or ``encoder.layers.5`` of a model with encoder and decoder; of
all other parameters the part of the model, such as ``embedding`` or ``decoder.final_norm``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.data_parallel.parameter_shards import is_first_copy
from trainer.ops.tensor_lists import L2_NORM
from trainer.optimizer.split_master import Master, Own, joined

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainer.parallel_model import ParallelModel


def owned_parts(model: ParallelModel, tensors: Mapping[str, Own]) -> Iterator[tuple[str, Own]]:
    """Parts of the shards' 1-D ``tensors`` that this rank counts: exactly one rank counts each element.

    A tied table counts once; vocabulary padding never counts.
    """
    for shard in model.gradients.parameter_shards:
        layout = model.layouts[shard.name]
        if is_first_copy(layout, model.mesh, model.gradients.is_sharded):
            for start, stop in layout.owned_ranges(model.mesh, shard.start, shard.stop):
                yield shard.name, tensors[shard.name][start - shard.start : stop - shard.start]


def layer_of(name: str) -> str:
    """The layer of a parameter or module by its global name."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: place + 1])
    return ".".join(parts[:2]) if parts[0] in ("encoder", "decoder") else parts[0]


class LayerSums:
    """This rank's share of the sums of each layer of the whole model; the sum over all ranks is the model's.

    Attributes:
        layers: names of the layers of the whole model, the same on every rank.
        places: place of each in that list.
    """

    def __init__(self, model: ParallelModel) -> None:
        """Collect the names of the layers. Collective: all ranks of the job."""
        self._model = model
        self._device = next(iter(model.parameters.values())).device
        found: list[list[str]] = [[]] * model.mesh.world_size
        own = sorted({layer_of(name) for name in model.layouts})
        if model.mesh.world_size > 1:
            dist.all_gather_object(found, own)
        else:
            found = [own]
        self.layers = sorted({layer for layers in found for layer in layers}, key=_in_order)
        self.places = {layer: place for place, layer in enumerate(self.layers)}

    def empty(self, *shape: int) -> Tensor:
        """Zeros for a sum of each layer, float64 [layers, *shape]."""
        return torch.zeros((len(self.layers), *shape), dtype=torch.float64, device=self._device)

    def squares(self, tensors: Mapping[str, Master]) -> Tensor:
        """Sum of squares of each layer, float64 [layers], of 1-D tensors by the names of the shards.

        Split masters are joined a layer at a time. Does not wait for the device, unless tensors are in CPU memory.
        """
        parts: dict[tuple[str, torch.device], list[Master]] = {}
        for name, part in owned_parts(self._model, tensors):
            parts.setdefault((layer_of(name), part.device), []).append(part)
        sums = self.empty()
        kernels = self._model.kernels
        for (layer, device), own in parts.items():
            norm = (kernels if device == self._device else kernels.in_cpu_memory)[L2_NORM]
            sums[self.places[layer]] += norm([joined(part) for part in own]).to(self._device)
        return sums

    def zeros(self) -> Tensor:
        """Number of zeros in the gradients, float64 [1]. Does not wait for the device."""
        gradients = {shard.name: shard.gradient for shard in self._model.gradients.parameter_shards}
        count = torch.zeros(1, dtype=torch.float64, device=self._device)
        for _, part in owned_parts(self._model, gradients):
            count += part.numel() - torch.count_nonzero(part)
        return count

    def gradient_squares(self) -> Tensor:
        """``squares`` of the main gradients."""
        return self.squares({shard.name: shard.gradient for shard in self._model.gradients.parameter_shards})


def _in_order(layer: str) -> list[tuple[int, Any]]:
    return [(1, int(part)) if part.isdecimal() else (0, part) for part in layer.split(".")]

"""A model of this trainer on the CPU whose layers have weights only while they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.load import check_same_model
from trainer.distributed.mesh import ParallelMesh, ProcessGroups
from trainer.parallel_model import ParallelModel, build_model

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig


@dataclass(frozen=True)
class Weights:
    """Whole tensors of a model, by our global names and without padding.

    Attributes:
        origin: folder, for messages.
        shapes: of all tensors.
        read: gives a tensor; called for each computation of its layer.
        rounded: dtype to which parameters are rounded; None for as they are.
    """

    origin: Path
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    rounded: torch.dtype | None = None

    def parameter(self, name: str) -> Tensor:
        """A parameter, rounded."""
        tensor = self.read(name)
        return tensor if self.rounded is None else tensor.to(self.rounded)


def build_bounded_model(config: TrainConfig, vocab_size: int, weights: Weights) -> ParallelModel:
    """Build the model on one rank. Only what lies outside the layers, and small buffers, stay in memory.

    Args:
        config: the whole training config, of one rank.
        vocab_size: rows of the vocabulary tables, without padding.
        weights: its tensors.

    Raises:
        AnotherModelError: a tensor is missing, left over, or has another shape.
        CheckpointError, HubError: a tensor cannot be read, now or when its layer computes.
    """
    mesh = ParallelMesh(tp=1, pp=1, dp=1, rank=0)
    # A frozen model draws no values: the system gives its parameters no memory before they are written.
    model = build_model(config, vocab_size, mesh, ProcessGroups(), torch.device("cpu"), is_frozen=True)
    check_same_model(weights.origin, weights.shapes, model)
    [chunk] = model.chunks
    chunk.eval()
    layers = list(_layers(chunk))
    # Tables, which prediction layers share with the rest of the model, are not part of a layer.
    within = {id(parameter) for layer in layers for parameter in layer.parameters()}
    within -= {id(parameter) for module in _outside(chunk) for parameter in module.parameters(recurse=False)}
    names = {id(parameter): name for name, parameter in model.parameters.items()}
    for layer in layers:
        held = [(names[id(parameter)], parameter) for parameter in layer.parameters() if id(parameter) in within]
        layer.register_forward_pre_hook(_Fill(held, weights))
        layer.register_forward_hook(_Free(held))
    for name, parameter in model.parameters.items():
        if id(parameter) not in within:
            _copy(parameter.data, weights.parameter(name))
    for name, buffer in model.buffers.items():
        _copy(buffer, weights.read(name))
    return model


def _layers(chunk: nn.Module) -> Iterator[nn.Module]:
    """The outermost members of lists of modules."""
    for child in chunk.children():
        yield from child if isinstance(child, nn.ModuleList) else _layers(child)


def _outside(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that are not within a list of modules."""
    yield module
    for child in module.children():
        if not isinstance(child, nn.ModuleList):
            yield from _outside(child)


def _copy(target: Tensor, source: Tensor) -> None:
    """Fill a tensor; rows of padding become zeros."""
    target[: len(source)].copy_(source)
    target[len(source) :].zero_()


class _Fill:
    """Reads a layer's parameters before the layer computes."""

    def __init__(self, held: list[tuple[str, nn.Parameter]], weights: Weights):
        self._held = held
        self._weights = weights

    def __call__(self, *_: Any) -> None:
        for name, parameter in self._held:
            parameter.data = self._weights.parameter(name).to(parameter.dtype)


class _Free:
    """Gives the memory of a layer's parameters back."""

    def __init__(self, held: list[tuple[str, nn.Parameter]]):
        self._held = held

    def __call__(self, *_: Any) -> None:
        for _name, parameter in self._held:
            parameter.data = parameter.new_empty(0)

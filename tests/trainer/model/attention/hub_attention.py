"""One attention layer of ours beside that of transformers, with the same weights: results and all gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from trainer.config.sections.model import ModelConfig
from trainer.distributed.mesh import ParallelMesh
from trainer.model.context import ForwardPass, ParallelAxes
from trainer.model.rotary import RotaryTable
from trainer.model.sharding import ParameterBuilder

LENGTH, BATCH = 12, 2
CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def draw(name: str, *shape: int) -> torch.Tensor:
    """Normal numbers that depend on the name alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def model_config(**keys: Any) -> ModelConfig:
    """A model of one layer without dropout and biases."""
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 8, "max_position_embeddings": LENGTH}
    plain = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "disable_bias_linear": True, "init_method_std": 0.2}
    rope = {"position_embedding_type": "rope", "normalization": "RMSNorm"}
    return ModelConfig.model_validate({**shape, **plain, **rope, **keys})


def our_layer(
    model: ModelConfig, build: Callable[..., nn.Module], rotary: RotaryTable | None
) -> tuple[Tensors, Tensors]:
    """Weights by name, and ``output``, ``input`` (its gradient) and the gradient of each weight, of ``build``'s layer.

    ``build`` takes model, layer, builder and axes.
    """
    builder = ParameterBuilder(1, ParallelMesh(1, 1, 1, 0), False, torch.float32, CPU)
    layer = build(model, 0, builder, ParallelAxes())
    with torch.no_grad():
        for name, parameter in builder.parameters.items():
            if not builder.layouts[name].decay:
                parameter += 0.3 * draw(name, *parameter.shape)
    hidden = draw("hidden", BATCH, LENGTH, model.hidden_size).transpose(0, 1).requires_grad_()
    output = layer(hidden, ForwardPass(rotary))
    output.backward(draw("gradient", BATCH, LENGTH, model.hidden_size).transpose(0, 1))
    weights = {name: parameter.detach() for name, parameter in builder.parameters.items()}
    found = {name: parameter.grad for name, parameter in builder.parameters.items()}
    return weights, {**found, "output": output.transpose(0, 1).detach(), "input": hidden.grad.transpose(0, 1)}


def hub_layer(
    layer: nn.Module, angles: tuple[torch.Tensor, torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> Tensors:
    """``output``, ``input`` (its gradient) and the gradient of each weight of transformers' ``layer``."""
    layer.load_state_dict(dict(weights))
    hidden = draw("hidden", BATCH, LENGTH, layer.config.hidden_size).requires_grad_()
    mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]
    output, _ = layer(hidden, position_embeddings=angles, attention_mask=mask)
    output.backward(draw("gradient", BATCH, LENGTH, layer.config.hidden_size))
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {**found, "output": output.detach(), "input": hidden.grad}


def unpacked(packed: torch.Tensor, model: ModelConfig) -> list[torch.Tensor]:
    """Rows of queries, keys and values, of a tensor whose rows are packed by query group."""
    queries = model.num_attention_heads // model.query_groups
    heads = packed.unflatten(0, (model.query_groups, queries + 2, model.head_dim))
    return [part.flatten(0, 2) for part in (heads[:, :-2], heads[:, -2:-1], heads[:, -1:])]


def check_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Require equal names, and values equal up to 1e-5 of the largest."""
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        error = (found[name] - right).abs().max() / right.abs().max()
        assert float(error) <= 1e-5, f"{name} is off by {float(error):.1e}"

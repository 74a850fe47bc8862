"""One attention layer on one rank: its weights, result and gradients."""

from __future__ import annotations

from collections.abc import Callable
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
LATENT = {
    "multi_latent_attention": True,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 7,
}


def draw(name: str, *shape: int) -> torch.Tensor:
    """Normal numbers that depend on the name alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def model_config(**keys: Any) -> ModelConfig:
    """A model of one layer without dropout and biases."""
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 8, "max_position_embeddings": LENGTH}
    plain = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "disable_bias_linear": True, "init_method_std": 0.2}
    rope = {"position_embedding_type": "rope", "normalization": "RMSNorm"}
    return ModelConfig.model_validate({**shape, **plain, **rope, **keys})


def attend(
    model: ModelConfig, build: Callable[..., nn.Module], rotary: RotaryTable | None = None
) -> tuple[Tensors, Tensors]:
    """Weights by name; and ``output``, ``input`` (its gradient) and the gradient of each weight.

    ``build`` makes the layer from model, layer, builder and axes.
    """
    builder = ParameterBuilder(1, ParallelMesh(1, 1, 1, 0), False, torch.float32, CPU)
    layer = build(model, 0, builder, ParallelAxes())
    hidden = draw("hidden", BATCH, LENGTH, model.hidden_size).transpose(0, 1).requires_grad_()
    output = layer(hidden, ForwardPass(rotary))
    output.backward(draw("gradient", BATCH, LENGTH, model.hidden_size).transpose(0, 1))
    weights = {name: parameter.detach() for name, parameter in builder.parameters.items()}
    found = {name: parameter.grad for name, parameter in builder.parameters.items()}
    return weights, {**found, "output": output.detach(), "input": hidden.grad}

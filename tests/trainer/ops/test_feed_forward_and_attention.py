"""Layers with the library's activation and rotary embedding equal layers in torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from trainer.config.sections.model import ModelConfig
from trainer.distributed.mesh import ParallelMesh
from trainer.model.attention.self_attention import SelfAttention
from trainer.model.context import ForwardPass, ParallelAxes
from trainer.model.mlp import MLP
from trainer.model.moe.experts import Experts
from trainer.model.rotary import RotaryTable
from trainer.model.sharding import ParameterBuilder
from trainer.model.tensor_parallel.collectives import TensorParallel
from trainer.model.tensor_parallel.linear import ColumnParallelLinear
from trainer.ops.activation import ACTIVATION
from trainer.ops.dispatch.registry import Kernels
from trainer.ops.operation import BySize
from trainer.ops.rotary import ROPE

pytestmark = pytest.mark.usefixtures("kernel_library")

NATIVE = Kernels(
    activation=ACTIVATION.implementations["native"].function,
    rope=ROPE.implementations["native"].function,
)
ACTIVATIONS = ({"swiglu": True}, {}, {"openai_gelu": True})
ALONE = ParallelMesh(tp=1, pp=1, dp=1, rank=0)
HIDDEN = torch.randn(9, 2, 48, generator=torch.Generator().manual_seed(3))


def model(**changes: object) -> ModelConfig:
    given = {"num_layers": 1, "hidden_size": 48, "ffn_hidden_size": 72, "num_attention_heads": 6}
    return ModelConfig.model_validate({**given, **changes})


def builder(kernels: Kernels) -> ParameterBuilder:
    return ParameterBuilder(7, ALONE, False, torch.float32, torch.device("cpu"), kernels)


def outcome(layer: nn.Module, *arguments: object) -> list[torch.Tensor]:
    """Output, and gradients of the input and of every parameter."""
    hidden = HIDDEN.clone().requires_grad_()
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):  # biases start as zeros
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
    output = layer(hidden, *arguments)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(4)))
    grads = [tensor.grad for tensor in (hidden, *layer.parameters())]
    assert all(grad is not None for grad in grads)
    return [output.detach(), *grads]


def check_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Entries may differ by 2e-5 of themselves and 1e-6 of the largest: sums that cancel keep the rounding of terms."""
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=2e-5, atol=1e-6 * float(other.abs().max().clamp(min=2.0)))


@pytest.mark.parametrize("disable_bias_linear", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forward_layers(activation: dict[str, bool], disable_bias_linear: bool) -> None:
    config = model(disable_bias_linear=disable_bias_linear, **activation)
    own, reference = (MLP(config, builder(kernels), TensorParallel()) for kernels in (NATIVE, Kernels()))
    check_same(outcome(own), outcome(reference))


def test_the_bias_of_a_small_layer_is_left_to_the_matrix_product(monkeypatch: pytest.MonkeyPatch) -> None:
    function = ACTIVATION.function("native", "cpu")
    assert isinstance(function, BySize)
    config, told = model(openai_gelu=True), []
    forward = ColumnParallelLinear.forward
    # 9 x 2 tokens, 72 channels.
    for smallest in (9 * 2 * 72 + 1, 9 * 2 * 72):
        kernels = Kernels(activation=replace(function, smallest=smallest))
        own, reference = (MLP(config, builder(chosen), TensorParallel()) for chosen in (kernels, Kernels()))
        expected = outcome(reference)
        with monkeypatch.context() as patch:
            patch.setattr(
                ColumnParallelLinear,
                "forward",
                lambda self, inputs, inside_tp_region=False, *, adds_bias=True: (
                    told.append(adds_bias) or forward(self, inputs, inside_tp_region, adds_bias=adds_bias)
                ),
            )
            check_same(outcome(own), expected)
    assert told == [True, False]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_experts_with_and_without_recompute(activation: dict[str, bool], recompute: bool) -> None:
    config = model(num_experts=3, moe_ffn_hidden_size=24, **activation)
    rows, offsets = HIDDEN.flatten(0, 1), [0, 7, 7, 18]
    found = []
    for kernels in (NATIVE, Kernels()):
        experts = Experts(config, builder(kernels), 1, recompute and kernels is NATIVE)
        leaf = rows.clone().requires_grad_()
        output = experts(leaf, offsets)
        output.backward(rows)
        found.append([output.detach(), leaf.grad, *(parameter.grad for parameter in experts.parameters())])
    check_same(*found)


@pytest.mark.parametrize("groups", [6, 2, 1])
@pytest.mark.parametrize("positions", ["rope", "rope of half the channels", "rope of each sample", "none"])
def test_attention(groups: int, positions: str) -> None:
    percent = 0.5 if "half" in positions else 1.0
    config = model(
        num_query_groups=groups,
        group_query_attention=True,
        position_embedding_type="none" if positions == "none" else "rope",
        rotary_percent=percent,
        attention_dropout=0.0,
    )
    table = RotaryTable.build(32, int(config.head_dim * percent), 10000.0, torch.float32, torch.device("cpu"))
    if "sample" in positions:
        table = table.at(torch.randint(32, (9, 2), generator=torch.Generator().manual_seed(5)))
    forward_pass = ForwardPass(rotary=None if positions == "none" else table.first(9))
    own, reference = (SelfAttention(config, 0, builder(kernels), ParallelAxes()) for kernels in (NATIVE, Kernels()))
    check_same(outcome(own, forward_pass), outcome(reference, forward_pass))

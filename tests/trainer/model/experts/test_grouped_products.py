"""Products of all experts in one launch, with offsets on the device: they compute what a product per expert does."""

from unittest import mock

import pytest
import torch

from tests.trainer.model.moe_layers import HIDDEN, build_layer, config_of, draw
from trainer.data_parallel.main_gradient import MainGradient
from trainer.distributed.mesh import ParallelMesh, ProcessGroups
from trainer.model.context import ExpertParallel, ForwardPass
from trainer.model.moe import experts, grouped_products
from trainer.model.moe.dispatch import Dispatch

RANGES = [[0, 0, 5, 5, 9], [0, 9, 9, 9, 9], [0, 2, 4, 7, 9]]


def grouped_linear(offsets, dtype=torch.bfloat16, device="cpu"):
    """Outputs and gradients of four experts with biases, for numbers that bfloat16 has."""
    shapes = {"rows": (9, 16), "weight": (4, 2, 8, 16), "bias": (4, 2, 8), "gradient": (9, 16)}
    drawn = [draw(name, *shape).to(torch.bfloat16).to(device, dtype) for name, shape in shapes.items()]
    inputs, weight, bias, gradient = drawn
    layer = experts.GroupedLinear(torch.nn.Parameter(weight), torch.nn.Parameter(bias))
    outputs = layer(inputs.requires_grad_(), offsets)
    outputs.backward(gradient)
    return [part.detach() for part in (outputs, inputs.grad, layer.weight.grad, layer.bias.grad)]


@pytest.mark.parametrize("offsets", RANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_launch_for_all_experts_computes_what_the_loop_does(offsets, dtype):
    looped, launched = (grouped_linear(given, dtype) for given in (offsets, torch.tensor(offsets, dtype=torch.int32)))
    for expected, found in zip(looped[:3], launched[:3], strict=True):
        assert torch.equal(found, expected)
    # The products with the biases sum in another order.
    torch.testing.assert_close(launched[3], looped[3])


def test_one_launch_takes_no_rows():
    layer = experts.GroupedLinear(torch.nn.Parameter(draw("weight", 2, 8, 16).bfloat16()), None)
    inputs = torch.zeros(0, 16, dtype=torch.bfloat16, requires_grad=True)
    outputs = layer(inputs, torch.zeros(3, dtype=torch.int32))
    assert outputs.shape == (0, 8)
    outputs.sum().backward()
    assert not layer.weight.grad.any()


@pytest.mark.gpu
@pytest.mark.parametrize("offsets", RANGES)
def test_one_launch_for_all_experts_on_a_gpu(offsets):
    rows = torch.zeros(9, 16, dtype=torch.bfloat16, device="cuda")
    has_kernel = torch.cuda.get_device_capability()[0] in (9, 10)
    assert grouped_products.has_grouped_kernel(rows, (4, 2, 8, 16)) == has_kernel
    on_device = torch.tensor(offsets, dtype=torch.int32, device="cuda")
    launched = grouped_linear(on_device if has_kernel else offsets, device="cuda")
    for expected, found in zip(grouped_linear(offsets, torch.float64), launched, strict=True):
        assert (found.double().cpu() - expected).abs().max() <= 2e-2 * expected.abs().max()


def layer_with_gradients(model, accumulates):
    """Output of a layer, and gradients of its tokens and parameters, over two micro-batches."""
    layer, builder = build_layer(config_of(model), ParallelMesh(tp=1, pp=1, dp=1, rank=0), ProcessGroups())
    layer.float()
    mains = {}
    if accumulates:
        for fc in (layer.experts.fc1, layer.experts.fc2):
            mains[fc] = MainGradient(torch.full(fc.weight.shape, torch.nan), lambda: None)
            fc.gradient_accumulator, mains[fc].sources = mains[fc], 1
            mains[fc].begin(2)
    found = []
    for name in ("first", "second"):
        hidden = draw(name, 5, 2, HIDDEN).float().requires_grad_()
        output = layer(hidden, ForwardPass())
        output.backward(draw("gradient", 5, 2, HIDDEN).float())
        found += [output.detach(), hidden.grad]
    gradients = [parameter.grad for parameter in builder.parameters.values() if parameter.grad is not None]
    return found + gradients + [main.main for main in mains.values()]


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("change", [{}, {"moe_router_topk": 3}, {"moe_expert_capacity_factor": 0.75}], ids=str)
def test_a_layer_computes_the_same_with_offsets_on_the_device(change, accumulates):
    model = {"swiglu": True, "disable_bias_linear": True, "moe_router_topk": 2, "moe_ffn_hidden_size": 8, **change}
    expected = layer_with_gradients(model, accumulates)
    with mock.patch.object(experts.Experts, "has_grouped_kernel", lambda *_: True):
        found = layer_with_gradients(model, accumulates)
    # A product into the main gradient sums in another order than a product that is added to that gradient.
    bits = {} if accumulates else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(found, expected, **bits)


def test_sizes_stay_on_the_device_if_no_row_is_sent_or_dropped():
    chosen = torch.tensor([[0, 2], [2, 0], [3, 2]])
    on_host = Dispatch.plan(chosen, None, 4, ExpertParallel())
    with mock.patch.object(torch.Tensor, "tolist", side_effect=AssertionError("read on the host")):
        on_device = Dispatch.plan(chosen, None, 4, ExpertParallel(), has_grouped_kernel=True)
    assert on_device.offsets.dtype == torch.int32
    assert on_device.offsets.tolist() == on_host.offsets == [0, 2, 2, 5, 6]
    assert torch.equal(on_device.choices, on_host.choices)
    assert torch.equal(on_device.rows, on_host.rows)

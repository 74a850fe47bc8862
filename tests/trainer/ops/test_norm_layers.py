"""Layers on the library's norms equal torch up to rounding, with recomputation and dropout."""

import pytest
import torch

from tests.trainer.model.recompute_case import FORMS, GPT2, LLAMA, MOE, VOCAB_SIZE, batch, make_config
from tests.trainer.ops.op_checks import check_errors, check_same_bits, drawn
from trainer.distributed.mesh import ParallelMesh
from trainer.distributed.random_streams import StepRandomness
from trainer.model.context import ParallelAxes
from trainer.model.decoder import GPTStage
from trainer.model.norm import Norm
from trainer.model.sharding import ParameterBuilder
from trainer.ops.dispatch.registry import Kernels
from trainer.ops.layer_norm import LAYER_NORM
from trainer.ops.rms_norm import ADD_RMS_NORM, RMS_NORM

pytestmark = pytest.mark.usefixtures("kernel_library")

REFERENCE = Kernels()
# For all sizes, although the library is not chosen for some small sizes.
NATIVE = Kernels(**{one.name: one.implementations["native"].function for one in (RMS_NORM, ADD_RMS_NORM, LAYER_NORM)})
MODELS = {"llama": LLAMA, "llama-dropout": {**LLAMA, "hidden_dropout": 0.1}, "gpt2": GPT2, "moe": MOE}


def results(model, kernels, dtype, training=None):
    """Output of three middle layers, and gradients of their input and parameters."""
    config = make_config(MODELS[model], training or {})
    mesh = ParallelMesh.build(config, 0, 1)
    builder = ParameterBuilder(1, mesh, False, dtype, torch.device("cpu"), kernels=kernels)
    stage = GPTStage(config, VOCAB_SIZE, range(1, 4), builder, ParallelAxes(), is_first=False, is_last=False)
    hidden = drawn((16, 2, 32), dtype).requires_grad_()
    output = stage(hidden, batch(0), StepRandomness(1, 0).micro_batch(0))
    # Not torch.autograd.grad: recomputation runs its own backward and accumulates gradients in the parameters.
    output.backward(drawn(output.shape, dtype, seed=1))
    gradients = [leaf.grad for leaf in (hidden, *builder.parameters.values())]
    return [output.detach(), *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_layers_compute_the_same(model, dtype):
    own, reference = results(model, NATIVE, dtype), results(model, REFERENCE, dtype)
    # Rounding differences of one layer grow in the following layers.
    check_errors(own, reference, results(model, REFERENCE, torch.float64), slack=64.0)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("form", FORMS)
def test_recomputation_gives_the_same_bits(model, form):
    check_same_bits(results(model, NATIVE, torch.float32, FORMS[form]), results(model, NATIVE, torch.float32))


# The dropout operation also adds the residual.
@pytest.mark.parametrize(("model", "expected"), [("llama", (1, 5)), ("llama-dropout", (6, 0)), ("moe", (1, 5))])
def test_a_layer_sums_and_norms_in_one_operation(model, expected):
    calls = []

    def counted(operation):
        def call(*arguments):
            calls.append(operation.name)
            return NATIVE[operation](*arguments)

        return call

    watched = Kernels(**{operation.name: counted(operation) for operation in (RMS_NORM, ADD_RMS_NORM)})
    results(model, watched, torch.float32)
    assert (calls.count("rms_norm"), calls.count("add_rms_norm")) == expected


@pytest.mark.parametrize("kernels", [REFERENCE, NATIVE], ids=["reference", "native"])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_a_norm_of_a_sum_is_the_norm_after_the_sum(kind, kernels):
    builder = ParameterBuilder(
        1, ParallelMesh(tp=1, pp=1, dp=1, rank=0), False, torch.float32, torch.device("cpu"), kernels=kernels
    )
    norm = Norm(kind, 24, 1e-5, builder)
    hidden, residual = drawn((5, 24), torch.float32), drawn((5, 24), torch.float32, seed=1)
    normed, total = norm.of_sum(hidden, residual)
    check_same_bits([total, normed], [hidden + residual, norm(hidden + residual)])

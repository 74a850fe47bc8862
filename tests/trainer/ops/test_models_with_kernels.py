"""Models on the library's kernels equal torch up to rounding, with recomputation and dropout."""

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
from trainer.ops.cross_entropy import CROSS_ENTROPY
from trainer.ops.dispatch.registry import OPERATIONS, Kernels
from trainer.ops.rms_norm import ADD_RMS_NORM, RMS_NORM
from trainer.ops.softmax import SCALED_CAUSAL_SOFTMAX

pytestmark = pytest.mark.usefixtures("kernel_library")

REFERENCE = Kernels()
# For all sizes, although the library is not chosen for some small sizes.
NATIVE = Kernels(**{one.name: one.implementations["native"].function for one in OPERATIONS})
# Rounding in 16 bits decides which of two tokens of equal weight is dropped.
UNDROPPED = {**MOE, "moe_expert_capacity_factor": None}
MODELS = {
    "llama": LLAMA,
    "llama-dropout": {**LLAMA, "hidden_dropout": 0.1},
    "gpt2": GPT2,
    "gpt2-unfused": {**GPT2, "attention_backend": "unfused"},
    "moe": UNDROPPED,
}
COUNTED = (RMS_NORM, ADD_RMS_NORM, CROSS_ENTROPY, SCALED_CAUSAL_SOFTMAX)


def build(model, kernels, dtype, training=None):
    """A whole model as one stage, and its parameters."""
    config = make_config(MODELS[model], training or {})
    mesh = ParallelMesh.build(config, 0, 1)
    builder = ParameterBuilder(1, mesh, False, dtype, torch.device("cpu"), kernels=kernels)
    stage = GPTStage(config, VOCAB_SIZE, range(4), builder, ParallelAxes(), is_first=True, is_last=True)
    return stage, list(builder.parameters.values())


def results(*case):
    """Loss of a whole model, and gradients of its parameters."""
    stage, parameters = build(*case)
    loss = stage(None, batch(0), StepRandomness(1, 0).micro_batch(0))
    # Not torch.autograd.grad: recomputation runs its own backward and accumulates gradients in the parameters.
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in parameters)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_models_compute_the_same(model, dtype):
    own, reference = results(model, NATIVE, dtype), results(model, REFERENCE, dtype)
    # Rounding differences of one layer grow in the following layers.
    check_errors(own, reference, results(model, REFERENCE, torch.float64), slack=64.0)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("form", FORMS)
def test_recomputation_gives_the_same_bits(model, form):
    check_same_bits(results(model, NATIVE, torch.float32, FORMS[form]), results(model, NATIVE, torch.float32))


# The dropout operation also adds the residual; only unfused attention with dropout keeps its probabilities.
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("llama", [1, 8, 1, 0]),
        ("llama-dropout", [9, 0, 1, 0]),
        ("gpt2", [0, 0, 1, 0]),
        ("gpt2-unfused", [0, 0, 1, 4]),
        ("moe", [1, 8, 1, 0]),
    ],
)
def test_models_run_on_the_kernels_that_they_are_given(model, expected):
    calls = []

    def counted(operation):
        def call(*arguments):
            calls.append(operation.name)
            return NATIVE[operation](*arguments)

        return call

    results(model, Kernels(**{operation.name: counted(operation) for operation in COUNTED}), torch.float32)
    assert [calls.count(operation.name) for operation in COUNTED] == expected


@pytest.mark.parametrize("model", MODELS)
def test_a_switch_leaves_no_old_function_in_use(model):
    calls = []

    def counted(operation):
        def call(*arguments):
            calls.append(operation.name)
            return REFERENCE[operation](*arguments)

        return call

    kernels = Kernels(**{operation.name: counted(operation) for operation in OPERATIONS})
    stage, parameters = build(model, kernels, torch.float32)
    stage(None, batch(0), StepRandomness(1, 0).micro_batch(0)).backward()
    assert {"activation", "rope", "cross_entropy"} <= set(calls)
    calls.clear()
    for parameter in parameters:
        parameter.grad = None
    kernels.switch_to(NATIVE)
    loss = stage(None, batch(0), StepRandomness(1, 0).micro_batch(0))
    loss.backward()
    assert calls == []
    found = [loss.detach(), *(parameter.grad for parameter in parameters)]
    check_same_bits(found, results(model, NATIVE, torch.float32))


@pytest.mark.parametrize("kernels", [REFERENCE, NATIVE], ids=["reference", "native"])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_a_norm_of_a_sum_is_the_norm_after_the_sum(kind, kernels):
    mesh = ParallelMesh(tp=1, pp=1, dp=1, rank=0)
    norm = Norm(kind, 24, 1e-5, ParameterBuilder(1, mesh, False, torch.float32, torch.device("cpu"), kernels=kernels))
    hidden, residual = drawn((5, 24), torch.float32), drawn((5, 24), torch.float32, seed=1)
    normed, total = norm.of_sum(hidden, residual)
    check_same_bits([total, normed], [hidden + residual, norm(hidden + residual)])

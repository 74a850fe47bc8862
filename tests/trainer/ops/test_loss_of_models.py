"""Models on the library's loss and attention-dropout kernels equal torch up to rounding."""

import pytest
import torch

from tests.trainer.model.recompute_case import FORMS, GPT2, LLAMA, VOCAB_SIZE, batch, make_config
from tests.trainer.ops.op_checks import check_errors, check_same_bits
from trainer.distributed.mesh import ParallelMesh
from trainer.distributed.random_streams import StepRandomness
from trainer.model.context import ParallelAxes
from trainer.model.decoder import GPTStage
from trainer.model.sharding import ParameterBuilder
from trainer.ops.cross_entropy import CROSS_ENTROPY
from trainer.ops.dispatch.registry import Kernels
from trainer.ops.softmax import SCALED_CAUSAL_SOFTMAX

pytestmark = pytest.mark.usefixtures("kernel_library")

REFERENCE = Kernels()
OPERATIONS = (CROSS_ENTROPY, SCALED_CAUSAL_SOFTMAX)
NATIVE = Kernels(**{operation.name: operation.implementations["native"].function for operation in OPERATIONS})
MODELS = {"llama": LLAMA, "gpt2": GPT2}


def results(model, kernels, dtype, training=None):
    """Loss of a whole model, and gradients of its parameters."""
    config = make_config(MODELS[model], training or {})
    mesh = ParallelMesh.build(config, 0, 1)
    builder = ParameterBuilder(1, mesh, False, dtype, torch.device("cpu"), kernels=kernels)
    stage = GPTStage(config, VOCAB_SIZE, range(4), builder, ParallelAxes(), is_first=True, is_last=True)
    loss = stage(None, batch(0), StepRandomness(1, 0).micro_batch(0))
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in builder.parameters.values())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_models_compute_the_same(model, dtype):
    own, reference = results(model, NATIVE, dtype), results(model, REFERENCE, dtype)
    # Rounding differences at the loss grow through the layers.
    check_errors(own, reference, results(model, REFERENCE, torch.float64), slack=64.0)


def test_recomputation_gives_the_same_bits():
    check_same_bits(results("gpt2", NATIVE, torch.float32, FORMS["core_attn"]), results("gpt2", NATIVE, torch.float32))


@pytest.mark.parametrize("model", MODELS)
def test_models_run_on_the_kernels_that_they_are_given(model):
    calls = []

    def counted(operation):
        def call(*arguments):
            calls.append(operation.name)
            return NATIVE[operation](*arguments)

        return call

    results(model, Kernels(**{operation.name: counted(operation) for operation in OPERATIONS}), torch.float32)
    # Attention without dropout never materializes its probabilities.
    assert [calls.count(operation.name) for operation in OPERATIONS] == [1, 4 if model == "gpt2" else 0]

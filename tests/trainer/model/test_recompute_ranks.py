"""Recompute where layers or weights are divided over ranks."""

import functools
from datetime import timedelta

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.model.recompute_case import FORMS, GPT2, LLAMA, VOCAB_SIZE, batch, make_config
from trainer.distributed.mesh import ParallelMesh, build_process_groups
from trainer.distributed.random_streams import StepRandomness
from trainer.model.context import ParallelAxes
from trainer.model.decoder import GPTStage
from trainer.model.sharding import ParameterBuilder
from trainer.parallel_model import build_model
from trainer.pipeline.executor import forward_backward
from trainer.planning.build_config import build_config

RANKS = 2


def divided(rank, world_size, model, training, sequence_parallel):
    """Gradients of this rank, and the number of its sums over tp."""
    config = build_config(
        {
            **make_config(model, training).model_dump(exclude_unset=True),
            "parallel": {"tensor_model_parallel_size": world_size, "sequence_parallel": sequence_parallel},
        }
    )
    mesh = ParallelMesh.build(config, rank, world_size)
    groups = build_process_groups(mesh, timedelta(seconds=60))
    parallel_model = build_model(config, VOCAB_SIZE, mesh, groups, torch.device("cpu"))
    with CountSums() as sums:
        forward_backward(parallel_model, [batch(0)], valid_tokens=32, loss_scale=1.0, randomness=StepRandomness(1, 0))
    found = {name: parallel_model.gradients.main_grad(name).clone() for name in parallel_model.parameters}
    return found, sums.count


class CountSums(TorchDispatchMode):
    """Counts sums over ranks, of whole activations or into parts of them."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count += str(function).startswith(("c10d.allreduce", "c10d._reduce_scatter_base"))
        return function(*arguments, **(keywords or {}))


MODELS = {"gpt2-dropout": GPT2, "llama": LLAMA}


@pytest.fixture(scope="module")
def not_recomputed(ranks):
    """The expected gradients, without recompute."""
    return functools.cache(lambda model, sequence_parallel: ranks.run(divided, MODELS[model], {}, sequence_parallel))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("form", ["full", "uniform-3", "all-parts"])
@pytest.mark.parametrize("model", MODELS)
def test_tensor_parallel_ranks_replay_alike(ranks, not_recomputed, model, form, sequence_parallel):
    expected = not_recomputed(model, sequence_parallel)
    found = ranks.run(divided, MODELS[model], FORMS[form], sequence_parallel)
    for (gradients_, count), (expected_gradients, expected_count) in zip(found, expected, strict=True):
        for name, gradient in expected_gradients.items():
            assert torch.equal(gradients_[name], gradient), name
        # A replay repeats attention's sum, but not the last sum, which serves only its values.
        extra = {"full": 4, "uniform-3": 3 * 2 - 1 + 1, "all-parts": 0}[form]
        assert count == expected_count + extra


def fully_sharded(rank, world_size, training):
    """Gradients of this rank's shards, and the number of weight gathers."""
    config = make_config(LLAMA, training)
    builder = ParameterBuilder(1, ParallelMesh(tp=1, pp=1, dp=1, rank=0), False, torch.float32, torch.device("cpu"))
    stage = GPTStage(config, VOCAB_SIZE, range(4), builder, ParallelAxes(), is_first=True, is_last=True)
    for module in (*stage.layers, stage):
        fully_shard(module, mesh=init_device_mesh("cpu", (world_size,)), reshard_after_forward=True)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    with CountGathers() as gathers:
        for number in range(2):
            part = batch(2 * number + rank)
            stage(None, part, StepRandomness(1, 0).micro_batch(part.index)).backward()
    return [parameter.grad.to_local().clone() for parameter in stage.parameters()], gathers.count


class CountGathers(TorchDispatchMode):
    """Counts gathers of weights."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count += str(function).startswith("c10d._allgather_base")
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_fully_sharded_weights_are_there_for_the_replay(ranks, form):
    expected = ranks.run(fully_sharded, {})
    found = ranks.run(fully_sharded, form)
    for (gradients_, count), (expected_gradients, expected_count) in zip(found, expected, strict=True):
        for gradient, right in zip(gradients_, expected_gradients, strict=True):
            assert right.any()
            assert torch.equal(gradient, right)
        assert count == expected_count, "weights gathered for backward must serve the replay too"

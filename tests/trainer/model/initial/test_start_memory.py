"""A start takes no more memory than what stays, in every division of the model."""

import gc
from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.trainer.model.initial.lone_rank import config_of, lone_rank
from trainer.optimizer.mixed_precision import MixedPrecisionOptimizer
from trainer.parallel_model import build_model

MODEL = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "ffn_hidden_size": 1024,
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
EXPERTS = {**MODEL, "num_layers": 2, "num_experts": 8}
VOCAB_SIZE = 8000
ZERO = {2: "optim_grads", 3: "optim_grads_params"}


def memory_of_start(model, parallel, ranks, **training):
    """Peak of a start on the first rank, and bytes that stay, of CPU memory that torch allocates."""
    config = config_of(model, parallel, **training)
    gc.collect()
    with lone_rank(config, 0, ranks) as (mesh, groups):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            built = build_model(config, VOCAB_SIZE, mesh, groups, torch.device("cpu"))
            optimizer = MixedPrecisionOptimizer(config, built)
        events = profiler.profiler.kineto_results.events()
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        del built, optimizer
    held = list(accumulate(change for _, change in changes))
    return max(held), held[-1]


@pytest.mark.parametrize("precision", [{"bf16": True}, {}], ids=["bf16", "fp32"])
@pytest.mark.parametrize("zero", ZERO)
def test_shards_are_never_whole(zero, precision):
    whole = memory_of_start(MODEL, {}, 1, **precision)[1] if not precision else None
    for ranks in (2, 4, 8, 16):
        peak, stays = memory_of_start(MODEL, {"data_parallel_sharding_strategy": ZERO[zero]}, ranks, **precision)
        assert peak <= 1.1 * stays, ranks
        if whole is not None:
            assert stays <= 1.05 * whole / ranks, ranks


@pytest.mark.parametrize(
    ("model", "parallel", "ranks"),
    [
        (MODEL, {"tensor_model_parallel_size": 2}, 2),
        (MODEL, {"tensor_model_parallel_size": 4}, 4),
        (MODEL, {"pipeline_model_parallel_size": 4}, 4),
        (MODEL, {"tensor_model_parallel_size": 2, "data_parallel_sharding_strategy": ZERO[3]}, 8),
        (EXPERTS, {"expert_model_parallel_size": 2}, 2),
        (EXPERTS, {"expert_model_parallel_size": 8}, 16),
        (EXPERTS, {"expert_model_parallel_size": 4, "data_parallel_sharding_strategy": ZERO[3]}, 16),
    ],
    ids=str,
)
def test_other_divisions_start_with_their_part(model, parallel, ranks):
    peak, stays = memory_of_start(model, parallel, ranks, bf16=True)
    assert peak <= 1.1 * stays

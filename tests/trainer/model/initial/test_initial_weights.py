"""New weights follow their distribution, and are the same in every layout."""

import math
import threading
from collections import Counter

import pytest
import torch

from tests.trainer.model.initial.lone_rank import config_of, lone_rank
from tests.trainer.parity.encoder_models import ENCODER_DECODERS
from trainer.distributed.mesh import ParallelMesh, ProcessGroups
from trainer.model.initial_values import RandomMatrix
from trainer.parallel_model import build_model
from trainer.planning.build_config import build_config

MODEL = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 96,
    "swiglu": True,
    "num_experts": 4,
    "moe_layer_freq": [0, 1],
    "untie_embeddings_and_output_weights": True,
    "make_vocab_size_divisible_by": 8,
}
VOCAB_SIZE = 1000
EMBEDDINGS = ("embedding.word.weight", "embedding.position.weight")
T5 = {**next(iter(ENCODER_DECODERS.values())), "num_layers": 2, "hidden_size": 64}


def weights_of(model, tp=1, rank=0):
    config = build_config(
        {
            "model": model,
            "parallel": {"tensor_model_parallel_size": tp},
            "training": {"train_iters": 1, "seq_length": 128},
            "optimizer": {"lr": 1e-3},
        }
    )
    mesh = ParallelMesh.build(config, rank, tp)
    built = build_model(config, VOCAB_SIZE, mesh, ProcessGroups(), torch.device("cpu"))
    return built.layouts, built.parameters, mesh


def test_weights_that_are_loaded_next_are_not_drawn(monkeypatch):
    monkeypatch.setattr(RandomMatrix, "_draw", None)
    config = config_of(MODEL, {})
    with lone_rank(config, 0, 1) as (mesh, groups):
        built = build_model(config, VOCAB_SIZE, mesh, groups, torch.device("cpu"), draws=False)
    assert all((weight == 0).all() for name, weight in built.parameters.items() if built.layouts[name].is_matrix)


def matrices(model):
    layouts, parameters, _ = weights_of(model)
    return {name: value.detach() for name, value in parameters.items() if layouts[name].is_matrix}


def test_xavier_bounds_every_matrix_by_its_rows_and_columns():
    found = matrices({**MODEL, "init_method": "xavier_uniform"})
    assert set(EMBEDDINGS) < set(found)
    for name, weight in found.items():
        each = weight if "experts" in name else weight[None]
        rows = VOCAB_SIZE if "word" in name or name == "head.weight" else math.prod(each.shape[1:-1])
        bound = math.sqrt(6 / (rows + each.shape[-1]))
        assert 0.97 * bound < each.abs().max() <= bound, name
        assert each.std() == pytest.approx(bound / math.sqrt(3), rel=0.1), name


@pytest.mark.parametrize("method", ["normal", "xavier_uniform"])
@pytest.mark.parametrize("shape", [MODEL, T5], ids=["decoder", "t5"])
def test_embeddings_may_have_a_deviation_of_their_own(shape, method):
    plain, own = (
        matrices({**shape, "init_method": method, **changes}) for changes in ({}, {"embedding_init_method_std": 0.5})
    )
    changed = {name for name in plain if not torch.equal(plain[name], own[name])}
    assert changed == set(EMBEDDINGS) & set(plain) if shape is MODEL else "embedding.word.weight" in changed
    for name in changed:
        assert own[name].std() == pytest.approx(0.5, rel=0.1), name
        assert own[name].abs().max() > 1.0


@pytest.mark.parametrize("keys", [{"init_method": "xavier_uniform"}, {"embedding_init_method_std": 0.5}], ids=str)
def test_every_layout_has_the_same_weights(keys):
    _, whole, _ = weights_of({**MODEL, **keys})
    for rank in range(2):
        layouts, parts, mesh = weights_of({**MODEL, **keys}, tp=2, rank=rank)
        for name, part in parts.items():
            assert torch.equal(part, layouts[name].shard(whole[name].detach(), mesh)), name


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(3, {}), (4, {"tensor_model_parallel_size": 2}), (8, {"expert_model_parallel_size": 2}), (16, {})],
    ids=str,
)
@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=str)
def test_every_sharding_has_the_same_weights(strategy, ranks, parallel, precision):
    """Rows of some matrices do not divide by the ranks, so that the last shards are smaller or empty."""
    _, whole, _ = weights_of(MODEL)
    config = config_of(MODEL, {**parallel, "data_parallel_sharding_strategy": strategy}, **precision)
    found = Counter()
    for rank in range(ranks):
        with lone_rank(config, rank, ranks) as (mesh, groups):
            model = build_model(config, VOCAB_SIZE, mesh, groups, torch.device("cpu"))
        for shard in model.gradients.parameter_shards:
            expected = model.layouts[shard.name].shard(whole[shard.name].detach(), mesh).view(-1)
            expected = expected[shard.start : shard.stop].to(torch.bfloat16 if precision else torch.float32)
            assert torch.equal(shard.weight, expected.to(shard.weight.dtype)), (rank, shard.name)
            found[shard.name] += len(expected)
    assert found.keys() == whole.keys()
    assert found["head.weight"] >= whole["head.weight"].numel()


def test_weights_are_drawn_beside_the_thread_of_the_build(monkeypatch):
    names, fill = set(), RandomMatrix.fill
    monkeypatch.setattr(
        RandomMatrix, "fill", lambda *given, **by_name: (names.add(own_name()), fill(*given, **by_name))
    )
    weights_of(MODEL)
    assert names
    assert threading.current_thread().name not in names


def own_name():
    return threading.current_thread().name

"""The expert bias only chooses, and moves against the load of all ranks; groups limit the choice."""

from datetime import timedelta

import pytest
import torch

from tests.trainer.model.moe_layers import HIDDEN, build_layer, config_of, draw
from tests.trainer.spawn import DEADLINE_S, Ranks
from trainer.distributed.mesh import ParallelMesh, ProcessGroups, build_process_groups
from trainer.model.context import ForwardPass
from trainer.model.moe.expert_bias import move_expert_biases

SERIAL = ParallelMesh(tp=1, pp=1, dp=1, rank=0)
TOKENS = 40
SIGMOID = {
    "swiglu": True,
    "disable_bias_linear": True,
    "num_experts": 8,
    "moe_router_topk": 3,
    "moe_router_score_function": "sigmoid",
}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
BIASED = {**SIGMOID, "moe_router_enable_expert_bias": True}


def router_of(model):
    return build_layer(config_of(model), SERIAL, ProcessGroups())[0].float().router


def test_the_expert_bias_only_chooses():
    """Weights are the scores without the bias, of whatever experts it has chosen."""
    router = router_of(BIASED)
    tokens = draw("tokens", TOKENS, HIDDEN).float()
    plain = router(tokens)
    with torch.no_grad():
        router.expert_bias.values[5] = 10.0
    biased = router(tokens)
    assert not (plain.experts == 5).any(1).all()
    assert (biased.experts[:, 0] == 5).all()
    scores = torch.sigmoid(biased.logits).gather(1, biased.experts)
    torch.testing.assert_close(biased.weights, scores / scores.sum(1, keepdim=True))
    torch.testing.assert_close(biased.shares, plain.shares)


@pytest.mark.parametrize("divides", [True, False], ids=["sum-1", "plain"])
def test_groups_and_experts_are_chosen_by_biased_scores_as_in_deepseek_v3(divides):
    v3 = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    shape = {"hidden_size": HIDDEN, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
    theirs = v3.DeepseekV3TopkRouter(v3.DeepseekV3Config(**shape, norm_topk_prob=divides))
    scale = {"moe_router_topk_scaling_factor": 2.5, "moe_router_norm_topk_prob": divides}
    router = router_of({**BIASED, **GROUPS, **scale})
    with torch.no_grad():
        theirs.weight.copy_(router.weight)
        for bias in (router.expert_bias.values, theirs.e_score_correction_bias):
            bias.copy_(draw("expert bias", 8) * 0.5)
    tokens = draw("tokens", TOKENS, HIDDEN).float()
    routing = router(tokens)
    _, weights, experts = theirs(tokens)
    found, expected = (
        torch.zeros(TOKENS, 8).scatter(1, chosen, of_chosen)
        for chosen, of_chosen in ((routing.experts, routing.weights), (experts, weights))
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def move_once(rank, world_size, rate, skipped):
    """Bias and load counted on ``world_size`` ranks with a share of the micro-batches each."""
    mesh = ParallelMesh(tp=1, pp=1, dp=world_size, rank=rank)
    groups = build_process_groups(mesh, timedelta(seconds=DEADLINE_S))
    layer, _ = build_layer(config_of({**BIASED, **GROUPS, "moe_router_bias_update_rate": rate}), mesh, groups)
    bias = layer.router.expert_bias
    for number in range(rank, 4, world_size):
        layer(draw(f"tokens{number}", 8, 2, HIDDEN), ForwardPass())
    load = bias.load.clone()
    move_expert_biases([layer], groups.dp_cp, was_skipped=skipped)
    assert not bias.load.any()
    return bias.values, load


def test_the_bias_moves_against_the_load_of_all_ranks():
    with Ranks(2) as ranks:
        [(serial, load)] = ranks.run(move_once, 0.25, False, world_size=1)
        parallel = ranks.run(move_once, 0.25, False, world_size=2)
        [(still, _)] = ranks.run(move_once, 0.25, True, world_size=1)
    assert load.sum() == 4 * 8 * 2 * 3
    torch.testing.assert_close(serial, 0.25 * (load.float().mean() - load).sign())
    assert serial.any()
    assert torch.equal(load, sum(own for _, own in parallel))
    assert all(torch.equal(values, serial) for values, _ in parallel)
    assert not still.any()


def test_evaluation_does_not_count():
    router = router_of(BIASED)
    tokens = draw("tokens", TOKENS, HIDDEN).float()
    router(tokens, is_training=False)
    with torch.no_grad():
        router(tokens, is_training=True)  # the first run of a layer that backward computes again
    assert not router.expert_bias.load.any()

"""The choice of sinkhorn equals Megatron-LM's formula, and is even in training only."""

import pytest
import torch

from tests.trainer.model.moe_layers import HIDDEN, build_layer, config_of, draw
from tests.trainer.model.reference_gpt import sinkhorn as reference
from trainer.distributed.mesh import ParallelMesh, ProcessGroups
from trainer.model.context_parallel.axis import ContextParallel
from trainer.model.moe.sinkhorn import sinkhorn

SERIAL = ParallelMesh(tp=1, pp=1, dp=1, rank=0)


@pytest.mark.parametrize("scale", [0.1, 1.0, 2.0])
@pytest.mark.parametrize("shape", [(1, 4), (33, 4), (8, 1), (7, 16)])
def test_scaled_products_equal_megatrons_formula(shape, scale):
    logits = draw("logits", *shape).float() * scale
    torch.testing.assert_close(sinkhorn(logits, ContextParallel()), reference(logits.double()), rtol=1e-9, atol=0)


def test_factors_that_only_drift_end():
    logits = draw("logits", 1, 4).float() * 4
    found, expected = sinkhorn(logits, ContextParallel()), reference(logits.double())
    assert not torch.allclose(found, expected, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("logits", [[[500.0, -500.0], [500.0, -500.0]], [[torch.nan, 0.0]], [[-torch.inf, 0.0]]])
def test_extreme_products_end(logits):
    assert sinkhorn(torch.tensor(logits), ContextParallel()).shape == (len(logits), 2)


@pytest.mark.parametrize("topk", [1, 2])
def test_training_chooses_evenly_and_evaluation_the_best(topk):
    config = config_of({"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": topk, "num_experts": 4})
    router = build_layer(config, SERIAL, ProcessGroups())[0].router
    with torch.no_grad():
        router.weight.mul_(0.3)
        router.weight[2] += 0.3
    tokens = draw("tokens", 200, HIDDEN) * 0.5 + 0.5
    trained, evaluated = router(tokens, is_training=True), router(tokens)
    assert evaluated.experts[:, 0].bincount(minlength=4)[2] > 150
    loads = trained.experts.flatten().bincount(minlength=4)
    assert loads.max() < 0.5 * topk * len(tokens)
    best = reference(trained.logits.detach()).sort(dim=1, descending=True, stable=True).indices[:, :topk]
    assert torch.equal(trained.experts, best)
    for routing in (trained, evaluated):
        scores = torch.sigmoid(routing.logits) if topk == 1 else torch.softmax(routing.logits, 1)
        torch.testing.assert_close(routing.weights, scores.gather(1, routing.experts))

"""Groups of experts, router bias and expert bias: equal to the routers of transformers."""

from importlib import import_module

import pytest
import torch

from tests.trainer.model.moe_layers import HIDDEN, Layout, build_layer, config_of, draw
from trainer.distributed.mesh import ParallelMesh, ProcessGroups
from trainer.model.context import ForwardPass

SERIAL = ParallelMesh(tp=1, pp=1, dp=1, rank=0)
EXPERTS, TOKENS = 8, 40
SWIGLU = {"swiglu": True, "disable_bias_linear": True, "num_experts": EXPERTS, "moe_router_topk": 3}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
SIGMOID = {"moe_router_score_function": "sigmoid"}
V3 = {**SWIGLU, **GROUPS, **SIGMOID, "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5}
SHAPE = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
}


def modeling(family):
    """Module of transformers. Its import takes seconds, which workers that run other files need not spend."""
    return import_module(f"transformers.models.{family}.modeling_{family}")


def layer_of(model):
    return build_layer(config_of(model, Layout()), SERIAL, ProcessGroups())[0].float()


def bias_of(number=0):
    return draw(f"expert bias {number}", EXPERTS).float() * 0.5


def spread(experts, weights):
    """[T, E], the weight of each expert, 0 for those not chosen."""
    return torch.zeros(len(experts), EXPERTS).scatter(1, experts, weights)


def check_router(model, theirs, bias=None):
    """Choices, weights and gradients of our router against one of transformers on the same weights."""
    router = layer_of(model).router
    with torch.no_grad():
        theirs.weight.copy_(router.weight)
        if router.bias is not None:
            theirs.bias.copy_(router.bias)
        if bias is not None:
            router.expert_bias.values.copy_(bias)
            theirs.e_score_correction_bias.copy_(bias)
    inputs = [draw("tokens", TOKENS, HIDDEN).float().requires_grad_() for _ in range(2)]
    routing = router(inputs[0])
    _, weights, experts = theirs(inputs[1])
    torch.testing.assert_close(routing.experts.sort(1).values, experts.sort(1).values)
    found, expected = spread(routing.experts, routing.weights), spread(experts, weights)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    factors = draw("factors", TOKENS, EXPERTS).float()
    (found * factors).sum().backward()
    (expected * factors).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(router.weight.grad, theirs.weight.grad, rtol=1e-5, atol=1e-5)
    if router.bias is not None:
        torch.testing.assert_close(router.bias.grad, theirs.bias.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("divides", [True, False], ids=["sum-1", "plain"])
def test_router_of_deepseek_v3(divides):
    v3 = modeling("deepseek_v3")
    theirs = v3.DeepseekV3TopkRouter(v3.DeepseekV3Config(**SHAPE, norm_topk_prob=divides))
    check_router({**V3, "moe_router_norm_topk_prob": divides}, theirs, bias_of())


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_router_of_deepseek_v2(method):
    groups = {**GROUPS, "moe_router_group_score": "max"} if method != "greedy" else {}
    v2 = modeling("deepseek_v2")
    theirs = v2.DeepseekV2TopkRouter(v2.DeepseekV2Config(**SHAPE, topk_method=method))
    check_router({**SWIGLU, **groups, "moe_router_pre_softmax": True}, theirs)


def test_router_of_gpt_oss():
    gpt_oss = modeling("gpt_oss")
    theirs = gpt_oss.GptOssTopKRouter(
        gpt_oss.GptOssConfig(
            hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=3, num_attention_heads=4
        )
    )
    check_router({**SWIGLU, "moe_router_bias": True}, theirs)


def test_layer_of_deepseek_v3():
    layer = layer_of({**V3, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 48})
    v3 = modeling("deepseek_v3")
    theirs = v3.DeepseekV3MoE(v3.DeepseekV3Config(**SHAPE, n_shared_experts=2))
    with torch.no_grad():
        theirs.gate.weight.copy_(layer.router.weight)
        for bias in (layer.router.expert_bias.values, theirs.gate.e_score_correction_bias):
            bias.copy_(bias_of())
        theirs.experts.gate_up_proj.copy_(layer.experts.fc1.weight.flatten(1, 2))
        theirs.experts.down_proj.copy_(layer.experts.fc2.weight)
        theirs.shared_experts.gate_proj.weight.copy_(layer.shared_expert.fc1.weight[0])
        theirs.shared_experts.up_proj.weight.copy_(layer.shared_expert.fc1.weight[1])
        theirs.shared_experts.down_proj.weight.copy_(layer.shared_expert.fc2.weight)
    inputs = [draw("tokens", 8, 5, HIDDEN).float().requires_grad_() for _ in range(2)]
    found, expected = layer(inputs[0], ForwardPass()), theirs(inputs[1])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for output in (found, expected):
        (output * draw("factors", 8, 5, HIDDEN).float()).sum().backward()
    pairs = {
        "inputs": [tensor.grad for tensor in inputs],
        "router": (layer.router.weight.grad, theirs.gate.weight.grad),
        "fc1": (layer.experts.fc1.weight.grad.flatten(1, 2), theirs.experts.gate_up_proj.grad),
        "fc2": (layer.experts.fc2.weight.grad, theirs.experts.down_proj.grad),
        "shared": (layer.shared_expert.fc2.weight.grad, theirs.shared_experts.down_proj.weight.grad),
    }
    for name, (ours, other) in pairs.items():
        assert (ours - other).abs().max() <= 1e-5 * other.abs().max(), name

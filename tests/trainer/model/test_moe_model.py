"""Models with experts in one process equal a token-by-token reference."""

import pytest
import torch

from tests.trainer.model.reference_gpt import reference_logits, reference_loss
from tests.trainer.model.test_model import LLAMA, batch, build, reference_weights
from trainer.distributed.random_streams import StepRandomness
from trainer.pipeline.executor import forward_backward, forward_logits

MIXTRAL = {**LLAMA, "ffn_hidden_size": 40, "num_query_groups": 2, "num_experts": 4}
LOSSES = {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1}
CAPACITY = {**MIXTRAL, **LOSSES, "moe_expert_capacity_factor": 0.7}
MODELS = {
    "mixtral": MIXTRAL,
    "mixtral-losses": {**MIXTRAL, **LOSSES},
    "softmax-first": {**MIXTRAL, **LOSSES, "moe_router_pre_softmax": True},
    "top-1": {**MIXTRAL, **LOSSES, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    "all-experts": {**MIXTRAL, **LOSSES, "moe_router_topk": 4},
    "scaled": {**MIXTRAL, "moe_router_topk": 3, "moe_router_topk_scaling_factor": 2.5},
    "sigmoid": {**MIXTRAL, **LOSSES, "moe_router_score_function": "sigmoid"},
    "sigmoid-top-1": {**MIXTRAL, **LOSSES, "moe_router_score_function": "sigmoid", "moe_router_topk": 1},
    "drops-by-probability": CAPACITY,
    "drops-by-position": {**CAPACITY, "moe_token_drop_policy": "position"},
    "shared-expert": {**MIXTRAL, "moe_shared_expert_intermediate_size": 24, "moe_ffn_hidden_size": 16},
    "every-second-layer": {**MIXTRAL, "moe_layer_freq": 2},
    "gpt2-with-biases": {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 8},
    "swiglu-with-biases": {"num_experts": 3, "swiglu": True, "openai_gelu": False, **LOSSES},
}


def disturb(parallel_model):
    """Randomise biases and norm weights.

    Initial zeros and ones would hide mistakes in their use.
    """
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in parallel_model.parameters.items():
            if not parallel_model.layouts[name].decay:
                parameter += torch.randn(parameter.shape, generator=generator).to(parameter) * 0.2


def expected_loss(weights, model, parts, valid_tokens):
    """The minimised loss: token losses over valid tokens, plus auxiliary losses.

    Auxiliary losses are averaged over micro-batches.
    """
    auxiliary = []
    loss = sum(reference_loss(weights, model, p.tokens, p.labels, p.loss_mask, auxiliary) for p in parts)
    (loss / valid_tokens + sum(auxiliary) / len(parts)).backward()
    return float(loss.detach())


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_loss_and_gradients_equal_the_reference(model):
    config, parallel_model = build(model)
    disturb(parallel_model)
    batches = [batch(0, masked=True), batch(1, masked=True)]
    loss = forward_backward(parallel_model, batches, valid_tokens=10, loss_scale=1.0, randomness=StepRandomness(1, 0))
    weights = reference_weights(parallel_model)
    assert float(loss) == pytest.approx(expected_loss(weights, config.model, batches, 10), rel=1e-6)
    for name, weight in weights.items():
        gradient = parallel_model.gradients.main_grad(name)[: len(weight)]
        error = (gradient.double() - weight.grad).abs().max()
        assert weight.grad.any(), name
        assert float(error) <= 5e-6 * float(weight.grad.abs().max()), name


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_logits_equal_the_reference(model):
    config, parallel_model = build(model)
    disturb(parallel_model)
    tokens = batch().tokens[:, :7]
    logits = forward_logits(parallel_model, tokens)
    # The capacity of experts applies in training only.
    unlimited = config.model.model_copy(update={"moe_expert_capacity_factor": None})
    expected = reference_logits(reference_weights(parallel_model), unlimited, tokens)
    torch.testing.assert_close(logits.double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.06), ("fp16", 0.008)])
def test_16_bit_stays_near_the_reference(precision, bound):
    # All experts of each layer, so that rounding cannot send a token to another one.
    config, parallel_model = build(MODELS["all-experts"], **{precision: True})
    parts = [batch(masked=True)]
    loss = forward_backward(parallel_model, parts, valid_tokens=10, loss_scale=8.0, randomness=StepRandomness(1, 0))
    weights = reference_weights(parallel_model)
    assert float(loss) == pytest.approx(expected_loss(weights, config.model, parts, 10), rel=bound)
    for name, weight in weights.items():
        gradient = parallel_model.gradients.main_grad(name)[: len(weight)].double() / 8
        assert float((gradient - weight.grad).abs().max()) <= bound * float(weight.grad.abs().max()), name


@pytest.mark.parametrize(
    "modules", [["moe"], ["moe_act"], ["moe", "moe_act", "layernorm"], ["core_attn", "mlp"]], ids=str
)
def test_recompute_gives_the_same_bits(modules):
    gradients = []
    for recompute in ({}, {"recompute_granularity": "selective", "recompute_modules": modules}):
        model = {**MODELS["drops-by-probability"], "moe_shared_expert_intermediate_size": 8, "moe_layer_freq": 2}
        _, parallel_model = build(model, **recompute)
        forward_backward(
            parallel_model, [batch(0), batch(1)], valid_tokens=10, loss_scale=1.0, randomness=StepRandomness(1, 0)
        )
        gradients.append({name: parallel_model.gradients.main_grad(name) for name in parallel_model.parameters})
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())

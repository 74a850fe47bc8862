"""The model in one process equals an independent plain PyTorch model."""

import pytest
import torch

from tests.trainer.model.reference_case import (
    LLAMA,
    SLACK,
    batch,
    build,
    distance,
    reference_weights,
    stirred,
)
from tests.trainer.model.reference_gpt import reference_logits, reference_loss
from trainer.data.samples.micro_batch import MicroBatch
from trainer.distributed.random_streams import StepRandomness
from trainer.model.context import ParallelAxes
from trainer.model.dropout import hidden_dropout
from trainer.ops.dispatch.registry import Kernels
from trainer.pipeline.executor import forward_backward, forward_logits

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
VALID_TOKENS = 10
GEMMA2 = {
    **LLAMA,
    "swiglu": False,
    "gated_linear_unit": True,
    "activation_func": "gelu_tanh",
    "untie_embeddings_and_output_weights": False,
    "norm_placement": "sandwich",
    "apply_layernorm_1p": True,
    "embedding_scale": 32**0.5,
    "final_logit_softcapping": 3.0,
}
OPT = {
    "norm_placement": "post",
    "has_final_norm": False,
    "activation_func": "relu",
    "embedding_size": 24,
    "position_embedding_offset": 2,
}
MIXTRAL = {**LLAMA, "ffn_hidden_size": 40, "num_query_groups": 2, "num_experts": 4}
LOSSES = {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1}
SINKHORN = {"moe_router_load_balancing_type": "sinkhorn", "moe_z_loss_coeff": 0.1}
CAPACITY = {**MIXTRAL, **LOSSES, "moe_expert_capacity_factor": 0.7}
EXPERT_MODELS = {
    "mixtral": MIXTRAL,
    "mixtral-losses": {**MIXTRAL, **LOSSES},
    "softmax-first": {**MIXTRAL, **LOSSES, "moe_router_pre_softmax": True},
    "top-1": {**MIXTRAL, **LOSSES, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    "all-experts": {**MIXTRAL, **LOSSES, "moe_router_topk": 4},
    "scaled": {**MIXTRAL, "moe_router_topk": 3, "moe_router_topk_scaling_factor": 2.5},
    "sigmoid": {**MIXTRAL, **LOSSES, "moe_router_score_function": "sigmoid"},
    "sigmoid-top-1": {**MIXTRAL, **LOSSES, "moe_router_score_function": "sigmoid", "moe_router_topk": 1},
    "sinkhorn": {**MIXTRAL, **SINKHORN},
    "sinkhorn-top-1": {**MIXTRAL, **SINKHORN, "moe_router_topk": 1},
    "loss-of-sequences": {**MIXTRAL, **LOSSES, "moe_router_load_balancing_type": "seq_aux_loss"},
    "drops-by-probability": CAPACITY,
    "drops-by-position": {**CAPACITY, "moe_token_drop_policy": "position"},
    "shared-expert": {**MIXTRAL, "moe_shared_expert_intermediate_size": 24, "moe_ffn_hidden_size": 16},
    "gated-shared-expert": {
        **MIXTRAL,
        "moe_shared_expert_intermediate_size": 24,
        "moe_shared_expert_gate": True,
        "moe_ffn_hidden_size": 16,
    },
    "every-second-layer": {**MIXTRAL, "moe_layer_freq": 2},
    "gpt2-with-biases": {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 8},
    "swiglu-with-biases": {"num_experts": 3, "swiglu": True, "openai_gelu": False, **LOSSES},
    "gpt-oss-experts": {**LLAMA, "num_experts": 4, "activation_clamp": 0.2, "activation_alpha": 1.702},
    "gated-relu-experts": {"num_experts": 4, "gated_linear_unit": True, "activation_func": "squared_relu"},
}
MODELS = {
    "gpt2": {"openai_gelu": True},
    "gpt2-exact-gelu": {},
    # Takes the path of dropout, with a probability that rounds to zero.
    "gpt2-nothing-dropped": {"openai_gelu": True, "hidden_dropout": 1e-12},
    "gpt2-untied": {"untie_embeddings_and_output_weights": True},
    "llama": LLAMA,
    "llama-tied": {**LLAMA, "untie_embeddings_and_output_weights": False},
    "llama-grouped": {**LLAMA, "num_query_groups": 2},
    "llama-multi-query": {**LLAMA, "num_query_groups": 1, "kv_channels": 12},
    "qwen": {**LLAMA, "num_query_groups": 2, "add_qkv_bias": True, "rotary_base": 1e6},
    "neox": {"position_embedding_type": "rope", "rotary_percent": 0.25, "ffn_hidden_size": 80},
    "swiglu-with-bias": {"swiglu": True, "position_embedding_type": "none"},
    "post-norm": {"norm_placement": "post", "has_final_norm": False},
    "post-rms-norm": {**LLAMA, "norm_placement": "post"},
    "sandwich": {**LLAMA, "norm_placement": "sandwich"},
    "output-norm": {**LLAMA, "norm_placement": "output"},
    "output-layer-norm": {"norm_placement": "output"},
    "rms-norm-1p": {**LLAMA, "apply_layernorm_1p": True},
    "layer-norm-1p": {"apply_layernorm_1p": True},
    "parallel": {"parallel_residual": True, "add_head_bias": True, "untie_embeddings_and_output_weights": True},
    "parallel-shared": {"parallel_residual": True, "shared_parallel_norm": True, "add_head_bias": True},
    "gemma2": GEMMA2,
    "opt": OPT,
    "word-norm": {"embedding_layer_norm": True},
    "word-layer-norm-of-llama": {**LLAMA, "embedding_layer_norm": True, "apply_layernorm_1p": True},
    "word-norm-of-opt": {**OPT, "embedding_layer_norm": True},
    "alibi": {"position_embedding_type": "alibi"},
    "alibi-of-six-heads": {**LLAMA, "position_embedding_type": "alibi", "num_attention_heads": 6, "kv_channels": 5}
    | {"num_query_groups": 3},
    "bloom": {"position_embedding_type": "alibi", "embedding_layer_norm": True, "openai_gelu": True},
    "by-width": {**LLAMA, "mup_base_hidden_size": 8, "embedding_scale": 3.0, "final_logit_softcapping": 3.0},
    "by-width-tied": {"mup_base_hidden_size": 24},
    "squared-relu": {"squared_relu": True},
    "gated-exact-gelu": {"gated_linear_unit": True},
    "gated-relu": {"gated_linear_unit": True, "activation_func": "relu"},
    "clamped-gates": {**LLAMA, "activation_clamp": 0.3},
    "gpt-oss": {**LLAMA, "disable_bias_linear": False, "activation_clamp": 0.3, "activation_alpha": 1.702},
    **EXPERT_MODELS,
}


def reference(parallel_model, model, batches, loss_scale, dtype=torch.float64):
    """Sum of the reference's token losses, and the scaled gradients of what is minimised.

    That is the mean loss of a token, and the mean over micro-batches of the auxiliary losses.
    """
    weights, auxiliary = reference_weights(parallel_model, dtype), []
    loss = sum(reference_loss(weights, model, part.tokens, part.labels, part.loss_mask, auxiliary) for part in batches)
    ((loss / VALID_TOKENS + sum(auxiliary) / len(batches)) * loss_scale).backward()
    return float(loss.detach()), {name: weight.grad.double() for name, weight in weights.items()}


def check(model, batches, loss_scale=1.0, precision="fp32"):
    """Compare loss and gradients with the reference in float64."""
    config, parallel_model = stirred(model, **({precision: True} if precision != "fp32" else {}))
    randomness = StepRandomness(1, 0)
    found = forward_backward(
        parallel_model, batches, valid_tokens=VALID_TOKENS, loss_scale=loss_scale, randomness=randomness
    )
    loss, expected = reference(parallel_model, config.model, batches, loss_scale)
    _, rounded = reference(parallel_model, config.model, batches, loss_scale, DTYPES[precision])
    rounding = max(distance(rounded[name], right) for name, right in expected.items())
    for name, right in expected.items():
        gradient = parallel_model.gradients.main_grad(name)
        assert right.any(), name
        assert gradient.dtype == torch.float32
        assert distance(gradient[: len(right)], right) <= SLACK * rounding, name
        assert not gradient[len(right) :].any(), name
    assert found.dtype == torch.float64 or precision == "fp32"
    # Some ten roundings of 2^-24 in the loss of each token; the 16-bit errors of tokens average out.
    bound = 1e-6 if precision == "fp32" else torch.finfo(DTYPES[precision]).eps
    assert float(found) == pytest.approx(loss, rel=bound)


@pytest.mark.parametrize("masked", [False, True], ids=["all-tokens", "masked"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_loss_and_gradients_equal_the_reference(model, masked):
    check(model, [batch(0, masked), batch(1, masked)])


def of_sinkhorn(model):
    if model.moe_router_load_balancing_type != "sinkhorn":
        return {}
    scores = (
        {"moe_router_score_function": "sigmoid"} if model.moe_router_topk == 1 else {"moe_router_pre_softmax": True}
    )
    return {"moe_router_load_balancing_type": "none", **scores}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_logits_equal_the_reference(model):
    config, parallel_model = stirred(model)
    # The capacity of experts and sinkhorn's choice apply in training only.
    unlimited = config.model.model_copy(update={"moe_expert_capacity_factor": None, **of_sinkhorn(config.model)})
    tokens = batch().tokens[:, :7]
    logits = forward_logits(parallel_model, tokens)
    expected, rounded = (
        reference_logits(reference_weights(parallel_model, dtype), unlimited, tokens).detach()
        for dtype in (torch.float64, torch.float32)
    )
    assert logits.shape == expected.shape
    assert distance(logits, expected) <= SLACK * distance(rounded, expected)


# Of experts all of each layer, so that rounding cannot send a token to another one.
@pytest.mark.parametrize("model", ["gpt2", "llama-grouped", "gemma2", "all-experts"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_stays_near_the_reference(model, precision):
    check(MODELS[model], [batch(masked=True)], loss_scale=8.0, precision=precision)


def test_initial_values_follow_the_published_rule():
    config, parallel_model = build({"num_layers": 8, "hidden_size": 64, "init_method_std": 0.02})
    for name, parameter in parallel_model.parameters.items():
        layout = parallel_model.layouts[name]
        rows = parameter[: layout.valid_rows].detach()
        if name.endswith("bias"):
            assert not rows.any(), name
        elif "norm" in name:
            assert bool((rows == 1).all()), name
        else:
            is_output = name.endswith(("projection.weight", "fc2.weight"))
            std = 0.02 / 4 if is_output else 0.02  # sqrt(2 * 8) = 4
            assert float(rows.std()) == pytest.approx(std, rel=0.07), name
            assert not parameter[len(rows) :].any(), "vocabulary padding starts as zeros"
        assert layout.decay == (parameter.ndim > 1 and not name.endswith("bias")), name


def test_initial_values_depend_on_seed_and_name_only():
    _, first = build({})
    _, again = build({"num_layers": 1, "hidden_dropout": 0.1})
    _, other = build({}, seed=7)
    for name, parameter in again.parameters.items():
        if not name.endswith(("projection.weight", "fc2.weight")):  # their width depends on the number of layers
            assert torch.equal(parameter, first.parameters[name]), name
    assert not torch.equal(
        first.parameters["layers.0.attention.qkv.weight"], first.parameters["layers.1.attention.qkv.weight"]
    )
    assert not torch.equal(first.parameters["embedding.word.weight"], other.parameters["embedding.word.weight"])


def test_tied_table_is_one_parameter():
    _, tied = build({})
    assert tied.chunks[0].head.output.weight is tied.chunks[0].embedding.word.weight
    assert "head.weight" not in tied.parameters
    assert not tied.layouts["embedding.word.weight"].tied_over_stages
    _, untied = build(MODELS["gpt2-untied"])
    assert not torch.equal(untied.parameters["head.weight"], untied.parameters["embedding.word.weight"])


@pytest.mark.parametrize("dropout", ["attention_dropout", "hidden_dropout"])
def test_dropout_repeats_with_its_address_and_changes_with_it(dropout):
    _, parallel_model = build({dropout: 0.5})

    def loss(iteration, index):
        part = MicroBatch(batch().tokens, batch().labels, None, index)
        return float(
            forward_backward(
                parallel_model, [part], valid_tokens=1, loss_scale=1.0, randomness=StepRandomness(3, iteration)
            )
        )

    torch.manual_seed(0)
    first = loss(0, 0)
    torch.manual_seed(1)
    assert loss(0, 0) == first, "the global random state must not matter"
    assert len({first, loss(1, 0), loss(0, 1)}) == 3


def test_dropout_keeps_the_expectation():
    randomness = StepRandomness(1, 0).micro_batch(0)
    dropped = hidden_dropout(torch.ones(64, 4, 32), 0.25, randomness, "embedding", ParallelAxes(), Kernels())
    assert dropped.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert float(dropped.mean()) == pytest.approx(1.0, abs=0.02)


def test_sequences_beyond_the_positions_are_refused():
    for model in ("gpt2", "llama"):
        _, parallel_model = build(MODELS[model])
        with pytest.raises(ValueError, match="a sequence of 13 exceeds the 12"):
            forward_logits(parallel_model, torch.zeros(1, 13, dtype=torch.int64))

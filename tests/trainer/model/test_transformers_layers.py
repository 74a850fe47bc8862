"""A layer equals transformers' own layer of the same weights: output, and gradients of input and weights.

transformers is not a dependency of the project; without it these tests are skipped.
"""

import pytest
import torch

from trainer.data.samples.micro_batch import MicroBatch
from trainer.distributed.mesh import ParallelMesh
from trainer.model.context import ParallelAxes
from trainer.model.decoder import GPTStage
from trainer.model.sharding import ParameterBuilder
from trainer.planning.build_config import build_config

transformers = pytest.importorskip("transformers")

HIDDEN, HEADS, WIDTH, FFN, LENGTH = 32, 4, 8, 48, 12
NO_BIAS = {"disable_bias_linear": True}
RMS = {"normalization": "RMSNorm", "norm_epsilon": 1e-6, "position_embedding_type": "rope", **NO_BIAS}


def build(**model):
    """One layer without embedding and head, and its parameters, all of them drawn."""
    config = build_config(
        {
            "model": {
                "num_layers": 1,
                "hidden_size": HIDDEN,
                "num_attention_heads": HEADS,
                "ffn_hidden_size": FFN,
                "attention_dropout": 0.0,
                "hidden_dropout": 0.0,
                **model,
            },
            "training": {"train_iters": 1, "seq_length": LENGTH},
            "optimizer": {"lr": 1e-3},
        }
    )
    builder = ParameterBuilder(1, ParallelMesh.build(config, 0, 1), False, torch.float32, torch.device("cpu"))
    stage = GPTStage(config, 61, range(1), builder, ParallelAxes(), is_first=False, is_last=False)
    return stage, builder.parameters


def packed(*parts):
    """Queries, keys and values as rows by head: the query, then the key, then the value."""
    return torch.stack([part.view(HEADS, WIDTH, *part.shape[1:]) for part in parts], 1).flatten(0, 2)


def loaded(parameters, theirs, names, layer="layers.0."):
    """Copy the weights of ``theirs``, and return pairs (our gradient, a function of the same gradient of theirs)."""
    weights = dict(theirs.named_parameters())
    assert {layer + name for name in names} == set(parameters)

    def of(source, kind):
        values = [getattr(weights[name], kind) for name in source.split()]
        if "qkv" in source or "query_key_value" in source:
            return values[0]
        if len(values) == 3:
            return packed(*values)
        return values[0] if len(values) == 1 else torch.stack(values)

    with torch.no_grad():
        for name, source in names.items():
            parameter = parameters[layer + name]
            parameter.copy_(of(source, "data").view(parameter.shape))
    return [
        (name, parameters[layer + name], lambda source=source: of(source, "grad")) for name, source in names.items()
    ]


def check(stage, pairs, theirs, **arguments):
    hidden = torch.randn(2, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(0)).requires_grad_()
    given = torch.randn(2, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected = theirs(hidden, **arguments)
    expected = expected[0] if isinstance(expected, tuple) else expected
    (of_hidden,) = torch.autograd.grad(expected, hidden, given, retain_graph=True)
    expected.backward(given)
    own = hidden.detach().transpose(0, 1).contiguous().requires_grad_()
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    output = stage(own, MicroBatch(tokens, tokens, None, 0), None)
    output.backward(given.transpose(0, 1))
    close(output.transpose(0, 1), expected)
    close(own.grad.transpose(0, 1), of_hidden)
    for name, parameter, gradient in pairs:
        right = gradient().view(parameter.shape)
        # The gradient of a key's bias is 0 but for rounding: the softmax does not see it.
        assert right.any() and parameter.grad is not None, name
        close(parameter.grad, right)


def close(found, right):
    torch.testing.assert_close(found, right.detach(), rtol=1e-5, atol=1e-5 * float(right.detach().abs().max()))


def draw(module):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module


def causal():
    return torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]


def settings(**more):
    return {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": WIDTH,
        "intermediate_size": FFN,
        "attn_implementation": "eager",
        "attention_dropout": 0.0,
        "num_hidden_layers": 1,
        "max_position_embeddings": LENGTH,
        **more,
    }


def angles(rotary, config):
    return rotary(config)(torch.zeros(2, LENGTH, HIDDEN), torch.arange(LENGTH).expand(2, -1))


GATED = {
    "attention.qkv.weight": "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight",
    "attention.projection.weight": "self_attn.o_proj.weight",
    "mlp.fc1.weight": "mlp.gate_proj.weight mlp.up_proj.weight",
    "mlp.fc2.weight": "mlp.down_proj.weight",
}


def test_gemma2_has_norms_before_and_after_which_multiply_by_1_plus_weight():
    from transformers.models.gemma2 import modeling_gemma2 as gemma2

    config = transformers.Gemma2Config(
        **settings(query_pre_attn_scalar=WIDTH, attn_logit_softcapping=None, sliding_window=LENGTH)
    )
    theirs = draw(gemma2.Gemma2DecoderLayer(config, 0))
    stage, parameters = build(
        **RMS, activation_func="gelu_tanh", gated_linear_unit=True, norm_placement="sandwich", apply_layernorm_1p=True
    )
    names = {
        **GATED,
        "attention_norm.weight": "input_layernorm.weight",
        "attention_output_norm.weight": "post_attention_layernorm.weight",
        "mlp_norm.weight": "pre_feedforward_layernorm.weight",
        "mlp_output_norm.weight": "post_feedforward_layernorm.weight",
    }
    check(
        stage,
        loaded(parameters, theirs, names),
        theirs,
        position_embeddings=angles(gemma2.Gemma2RotaryEmbedding, config),
        attention_mask=causal(),
        position_ids=torch.arange(LENGTH).expand(2, -1),
    )


def test_olmo2_norms_only_the_results():
    from transformers.models.olmo2 import modeling_olmo2 as olmo2

    config = transformers.Olmo2Config(
        **settings(rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    )
    theirs = olmo2.Olmo2DecoderLayer(config, 0)
    # The norms of queries and keys are part of the attention, and have tests of their own.
    theirs.self_attn.q_norm, theirs.self_attn.k_norm = torch.nn.Identity(), torch.nn.Identity()
    stage, parameters = build(**RMS, swiglu=True, norm_placement="output")
    names = {
        **GATED,
        "attention_output_norm.weight": "post_attention_layernorm.weight",
        "mlp_output_norm.weight": "post_feedforward_layernorm.weight",
    }
    check(
        stage,
        loaded(parameters, draw(theirs), names),
        theirs,
        position_embeddings=angles(olmo2.Olmo2RotaryEmbedding, config),
        attention_mask=causal(),
    )


@pytest.mark.parametrize("before", [False, True], ids=["opt-350m", "opt-125m"])
def test_opt_norms_before_the_sublayers_or_after_the_adds(before):
    from transformers.models.opt import modeling_opt as opt

    config = transformers.OPTConfig(
        **{
            **settings(ffn_dim=FFN, do_layer_norm_before=before, dropout=0.0, word_embed_proj_dim=HIDDEN),
            "attn_implementation": "eager",
        }
    )
    theirs = draw(opt.OPTDecoderLayer(config, 0))
    stage, parameters = build(activation_func="relu", norm_placement="pre" if before else "post")
    names = {
        "attention.qkv.weight": GATED["attention.qkv.weight"],
        "attention.qkv.bias": GATED["attention.qkv.weight"].replace("weight", "bias"),
    }
    for own, their in {
        "attention.projection": "self_attn.out_proj",
        "mlp.fc1": "fc1",
        "mlp.fc2": "fc2",
        "attention_norm": "self_attn_layer_norm",
        "mlp_norm": "final_layer_norm",
    }.items():
        names |= {f"{own}.{kind}": f"{their}.{kind}" for kind in ("weight", "bias")}
    check(stage, loaded(parameters, theirs, names), theirs, attention_mask=causal())


def test_neox_runs_attention_and_feed_forward_side_by_side():
    from transformers.models.gpt_neox import modeling_gpt_neox as neox

    config = transformers.GPTNeoXConfig(
        **settings(
            use_parallel_residual=True,
            hidden_dropout=0.0,
            hidden_act="gelu",
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        )
    )
    theirs = draw(neox.GPTNeoXLayer(config, 0))
    stage, parameters = build(parallel_residual=True, position_embedding_type="rope", rotary_percent=0.5)
    names = {}
    for own, their in {
        "attention.qkv": "attention.query_key_value",
        "attention.projection": "attention.dense",
        "mlp.fc1": "mlp.dense_h_to_4h",
        "mlp.fc2": "mlp.dense_4h_to_h",
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    }.items():
        names |= {f"{own}.{kind}": f"{their}.{kind}" for kind in ("weight", "bias")}
    check(
        stage,
        loaded(parameters, theirs, names),
        theirs,
        position_embeddings=angles(neox.GPTNeoXRotaryEmbedding, config),
        attention_mask=causal(),
    )


def test_phi_shares_one_norm_between_attention_and_feed_forward():
    from transformers.models.phi import modeling_phi as phi

    config = transformers.PhiConfig(
        **settings(
            resid_pdrop=0.0,
            layer_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        )
    )
    theirs = draw(phi.PhiDecoderLayer(config, 0))
    stage, parameters = build(
        parallel_residual=True,
        shared_parallel_norm=True,
        openai_gelu=True,
        position_embedding_type="rope",
        rotary_percent=0.5,
    )
    names = {
        "attention.qkv.weight": GATED["attention.qkv.weight"],
        "attention.qkv.bias": GATED["attention.qkv.weight"].replace("weight", "bias"),
    }
    for own, their in {
        "attention.projection": "self_attn.dense",
        "mlp.fc1": "mlp.fc1",
        "mlp.fc2": "mlp.fc2",
        "attention_norm": "input_layernorm",
    }.items():
        names |= {f"{own}.{kind}": f"{their}.{kind}" for kind in ("weight", "bias")}
    check(
        stage,
        loaded(parameters, theirs, names),
        theirs,
        position_embeddings=angles(phi.PhiRotaryEmbedding, config),
        attention_mask=causal(),
    )

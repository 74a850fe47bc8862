"""Parameter counts and FLOPs per token against published models."""

import pytest
import torch

from trainer.distributed.mesh import ParallelMesh, ProcessGroups
from trainer.families.catalogue import FAMILIES, read_model
from trainer.parallel_model import build_model
from trainer.planning.build_config import build_config
from trainer.planning.estimate.device_peaks import known_peak_tflops
from trainer.planning.flops import count_by_layer, count_parameters, flops_per_token
from trainer.planning.parts import block


def config(model, seq_length=2048):
    return build_config(
        {"model": model, "training": {"train_iters": 1, "seq_length": seq_length}, "optimizer": {"lr": 1e-4}}
    )


GPT2 = {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "max_position_embeddings": 1024}
LLAMA_2_7B = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "ffn_hidden_size": 11008,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
LLAMA_3_8B = {**LLAMA_2_7B, "ffn_hidden_size": 14336, "num_query_groups": 8}
QWEN_2_5_05B = {
    **LLAMA_2_7B,
    "num_layers": 24,
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_query_groups": 2,
    "ffn_hidden_size": 4864,
    "add_qkv_bias": True,
    "untie_embeddings_and_output_weights": False,
}
BERT_LARGE = {
    "architecture": "bert",
    "num_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "norm_placement": "post",
    "has_final_norm": False,
}
T5_BASE = {
    "architecture": "t5",
    "num_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "ffn_hidden_size": 3072,
    "position_embedding_type": "relative",
    "normalization": "RMSNorm",
    "activation_func": "relu",
    "disable_bias_linear": True,
}
T5_V1_1_BASE = {
    **T5_BASE,
    "ffn_hidden_size": 2048,
    "activation_func": "gelu_tanh",
    "gated_linear_unit": True,
    "untie_embeddings_and_output_weights": True,
}
MIXTRAL_8X7B = {**LLAMA_3_8B, "num_experts": 8, "moe_router_topk": 2}


@pytest.mark.parametrize(
    ("model", "seq_length", "vocab_size", "parameters"),
    [
        (GPT2, 1024, 50257, 124_439_808),
        (LLAMA_2_7B, 2048, 32000, 6_738_415_616),
        (LLAMA_3_8B, 2048, 128256, 8_030_261_248),
        (QWEN_2_5_05B, 2048, 151936, 494_032_768),
        (MIXTRAL_8X7B, 2048, 32000, 46_702_792_704),
        # BertForPreTraining of transformers with bert-large-uncased's config.json.
        (BERT_LARGE, 512, 30522, 336_226_108),
        # T5ForConditionalGeneration with the config.json of t5-base and of google/t5-v1_1-base.
        (T5_BASE, 512, 32128, 222_903_552),
        (T5_V1_1_BASE, 512, 32128, 247_577_856),
    ],
)
def test_counts_of_published_models(model, seq_length, vocab_size, parameters):
    assert count_parameters(config(model, seq_length), vocab_size).total == parameters


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_layers_taken_apart_are_all_layers(family):
    _, model = read_model(family.tiny | {"model_type": family.model_type}, "config.json")
    counts = count_parameters(config(model.model_dump(), model.max_position_embeddings), model.vocab_size)
    layers = count_by_layer(model)
    assert sum(equal.count * equal.parameters for equal in layers) == counts.layers
    assert sum(equal.count * equal.active for equal in layers) == counts.active_layers
    assert len({(equal.kind, equal.parameters) for equal in layers}) == len(layers)


def test_flops_by_hand():
    # GPT-2: all parameters, minus both input tables, plus the tied output table.
    counted = 124_439_808 - 1024 * 768
    expected = 6 * counted + 12 * 12 * 768 * 1024
    assert flops_per_token(config(GPT2, 1024), 50257) == expected
    untied = 6_738_415_616 - 32000 * 4096
    assert flops_per_token(config(LLAMA_2_7B), 32000) == 6 * untied + 12 * 32 * 4096 * 2048


def test_flops_of_encoder_and_decoder_by_hand():
    model = {**T5_V1_1_BASE, "decoder_num_layers": 6}
    encoder, decoder, width = 512, 128, 768
    attention, mlp, norms = 4 * width**2, 3 * width * 2048, 2 * width
    # Keys and values of the encoder's output are computed for its tokens, all else of the decoder for its own.
    seen_by_encoder = 12 * (attention + mlp + norms) + 6 * attention // 2 + width
    seen_by_decoder = 6 * (attention + attention // 2 + mlp + norms + width) + width + 32128 * width
    scores = 12 * width * (12 * encoder**2 + 6 * decoder * (decoder + encoder))
    expected = 6 * (encoder * seen_by_encoder + decoder * seen_by_decoder) + scores
    assert flops_per_token(config(model, encoder), 32128) == expected // (encoder + decoder)


def test_only_the_experts_of_a_token_count():
    # Mixtral 8x7B "has 47B parameters but only uses 13B active parameters" (Jiang et al. 2024, arXiv:2401.04088).
    counts = count_parameters(config(MIXTRAL_8X7B), 32000)
    assert (round(counts.total / 1e9, 1), round(counts.active / 1e9, 1)) == (46.7, 12.9)
    counted = counts.active - 32000 * 4096
    assert flops_per_token(config(MIXTRAL_8X7B), 32000) == 6 * counted + 12 * 32 * 4096 * 2048
    dense = count_parameters(config(LLAMA_3_8B), 128256)
    assert dense.active == dense.total


def test_layers_of_both_kinds_and_shared_experts_by_hand():
    shape = {"num_layers": 3, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 16}
    experts = {"num_experts": 4, "moe_layer_freq": 2, "moe_ffn_hidden_size": 4, "moe_router_topk": 1}
    experts |= {"moe_router_pre_softmax": True, "moe_shared_expert_intermediate_size": 6}
    model = {**shape, **experts, "disable_bias_linear": True, "normalization": "RMSNorm"}
    counts = count_parameters(config(model, 32), 10)
    attention_and_norms = 4 * 8 * 8 + 2 * 8
    dense, routed, expert, shared = 2 * 8 * 16, 8 * 4, 2 * 8 * 4, 2 * 8 * 6
    # Layers 0 and 2 have experts, layer 1 has none.
    assert counts.layers == 3 * attention_and_norms + dense + 2 * (routed + 4 * expert + shared)
    assert counts.active_layers == 3 * attention_and_norms + dense + 2 * (routed + expert + shared)


SMALL = {"num_layers": 3, "hidden_size": 16, "num_attention_heads": 4, "make_vocab_size_divisible_by": 1}
RMS_ROPE = {"normalization": "RMSNorm", "position_embedding_type": "rope"}
LATENT = {
    **RMS_ROPE,
    "multi_latent_attention": True,
    "kv_lora_rank": 6,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 3,
}
T5 = {"architecture": "t5", "position_embedding_type": "relative", "disable_bias_linear": True}
EXPERTS = {"num_experts": 4, "moe_layer_freq": 2, "moe_ffn_hidden_size": 24}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"swiglu": True, "num_query_groups": 2, "disable_bias_linear": True, "add_qkv_bias": True},
        {"untie_embeddings_and_output_weights": True, "position_embedding_type": "rope", "normalization": "RMSNorm"},
        {"qk_layernorm": True, "num_query_groups": 2},
        {"embedding_layer_norm": True, "position_embedding_type": "rope", "normalization": "RMSNorm"},
        {**RMS_ROPE, "qk_layernorm": True, "qk_layernorm_scope": "all", "num_query_groups": 2},
        {"disable_bias_linear": True, "add_attention_output_bias": True},
        LATENT,
        {**LATENT, "q_lora_rank": 5, "disable_bias_linear": True},
        EXPERTS,
        {**EXPERTS, "swiglu": True, "disable_bias_linear": True, "moe_shared_expert_intermediate_size": 8},
        {
            **EXPERTS,
            "disable_bias_linear": True,
            "moe_shared_expert_intermediate_size": 8,
            "moe_shared_expert_gate": True,
        },
        {**EXPERTS, "moe_layer_freq": 1, "moe_shared_expert_intermediate_size": 8},
        {"architecture": "bert", "norm_placement": "post", "has_final_norm": False},
        {"architecture": "bert", "untie_embeddings_and_output_weights": True},
        {"architecture": "bert", "bert_binary_head": False},
    ],
)
def test_counts_are_those_of_the_built_model(changes):
    one = config({**SMALL, **changes}, seq_length=32)
    model = build_model(one, 50, ParallelMesh(tp=1, pp=1, dp=1, rank=0), ProcessGroups(), torch.device("cpu"))
    counts = count_parameters(one, 50)
    assert counts.total == sum(parameter.numel() for parameter in model.parameters.values())
    assert counts.active_layers == sum(block.parameters(one.model, layer, active=True) for layer in range(3))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"decoder_num_layers": 2, "swiglu": True, "normalization": "RMSNorm"},
        {"position_embedding_type": "learned_absolute", "disable_bias_linear": False, "add_head_bias": True},
        {"position_embedding_type": "rope", "normalization": "RMSNorm"},
    ],
)
def test_counts_of_encoder_and_decoder_are_those_of_the_built_model(changes):
    one = config({**SMALL, **T5, **changes}, seq_length=128)
    model = build_model(one, 50, ParallelMesh(tp=1, pp=1, dp=1, rank=0), ProcessGroups(), torch.device("cpu"))
    assert count_parameters(one, 50).total == sum(parameter.numel() for parameter in model.parameters.values())


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.4),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA RTX A4000", None),
        ("CPU", None),
    ],
)
def test_known_peaks(name, peak):
    assert known_peak_tflops(name) == peak

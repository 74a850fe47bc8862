"""DeepSeek-V2 and V3: latent attention, routed and shared experts. Torch-free.

DeepSeek-AI 2024 (arXiv:2405.04434), section 2, and (arXiv:2412.19437), section 2.1; names: transformers
models/deepseek_v2/modeling_deepseek_v2.py and models/deepseek_v3/modeling_deepseek_v3.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from trainer.families.experts import experts, layer_pattern
from trainer.families.format.errors import FamilyError
from trainer.families.format.family import Family, Weight, affine, weight
from trainer.families.format.forms import Stacked
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope
from trainer.families.llama import ABSENT, SILU, TINY, ends, mlp, norms, read_shape, write_shape

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

# Names of what a prediction layer has besides an ordinary layer: the README of deepseek-ai/DeepSeek-V3,
# README_WEIGHTS.md.
_PREDICTION = (
    ("embedding_norm", "enorm"),
    ("hidden_norm", "hnorm"),
    ("merge", "eh_proj"),
    ("final_norm", "shared_head.norm"),
)
# Of the norms of latents in transformers and in DeepSeek's own code, whatever the file says.
_LATENT_EPSILON = 1e-6
_GREEDY, _GROUPS = "greedy", "group_limited_greedy"


_ABSENT: Mapping[str, Any] = {
    **ABSENT,
    "vocab_size": 102400,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 1407,
    "n_group": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": None,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 1.0,
    "topk_group": None,
    "v_head_dim": 128,
}
_WITHOUT_EFFECT = {
    "aux_loss_alpha": "is a coefficient of training, which a note tells",
    "ep_size": "says on how many ranks the original code runs",
    "head_dim": "is qk_rope_head_dim in transformers, whatever the file says",
    "qk_head_dim": "is the sum of qk_nope_head_dim and qk_rope_head_dim",
    "seq_aux": "belongs to aux_loss_alpha",
}


def _read_shared(hub: HubConfig) -> dict[str, Any]:
    """Keys of both families, without those of the router."""
    hub.only("hidden_act", *SILU)
    for key, value in (("attention_bias", False), ("mlp_bias", False), ("moe_layer_freq", 1)):
        hub.only(key, value)
    hub.only("num_key_value_heads", hub.need("num_attention_heads"))
    shape = {**read_shape(hub), **read_rope(hub)}
    first, layers = hub.take("first_k_dense_replace"), range(shape["num_layers"])
    expert_width, shared = hub.take("moe_intermediate_size"), hub.take("n_shared_experts", null=0)
    if shared < 1:
        raise FamilyError(f"{hub.where}: n_shared_experts is {shared}, but transformers needs at least one")
    factor = hub.take("routed_scaling_factor")
    return {
        **shape,
        "kv_channels": None,
        "multi_latent_attention": True,
        "q_lora_rank": hub.take("q_lora_rank", null=None),
        "kv_lora_rank": hub.take("kv_lora_rank"),
        "qk_head_dim": hub.take("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": hub.take("qk_rope_head_dim"),
        "v_head_dim": hub.take("v_head_dim"),
        "latent_norm_epsilon": None if shape["norm_epsilon"] == _LATENT_EPSILON else _LATENT_EPSILON,
        "num_experts": hub.take("n_routed_experts"),
        "moe_layer_freq": layer_pattern([layer >= first for layer in layers]),
        "moe_ffn_hidden_size": expert_width,
        "moe_shared_expert_intermediate_size": expert_width * shared,
        "moe_router_topk": hub.need("num_experts_per_tok"),
        "moe_router_topk_scaling_factor": None if factor == 1.0 else factor,
    }


def _write_shared(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    dense = takewhile(lambda layer: not model.is_moe_layer(layer), range(model.num_layers))
    shape = write_shape(model, vocab_size, max_positions)
    del shape["head_dim"]
    return {
        **shape,
        "hidden_act": "silu",
        "attention_bias": False,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_head_dim,
        "qk_rope_head_dim": model.qk_pos_emb_head_dim,
        "v_head_dim": model.v_head_dim,
        "n_routed_experts": model.num_experts,
        "n_shared_experts": (model.moe_shared_expert_intermediate_size or 0) // model.expert_ffn_size,
        "moe_intermediate_size": model.expert_ffn_size,
        "moe_layer_freq": 1,
        "first_k_dense_replace": len(list(dense)),
        "num_experts_per_tok": model.moe_router_topk,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
    }


def _groups(hub: HubConfig, score: str) -> dict[str, Any]:
    """Keys of the groups of experts; none if all experts are one group."""
    groups, best = hub.take("n_group", null=1), hub.take("topk_group", null=1)
    if groups == 1:
        return {}
    return {"moe_router_num_groups": groups, "moe_router_group_topk": best, "moe_router_group_score": score}


def _read_v2(hub: HubConfig) -> dict[str, Any]:
    hub.only("scoring_func", "softmax")
    hub.only("norm_topk_prob", False)
    method = hub.only("topk_method", _GREEDY, _GROUPS)
    shared, groups = _read_shared(hub), _groups(hub, "max")
    return {
        **shared,
        "rotary_interleaved": True,
        "moe_router_pre_softmax": True,
        **(groups if method == _GROUPS else {}),
    }


def _write_v2(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    return {
        **_write_shared(model, vocab_size, max_positions),
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "topk_method": _GREEDY if model.moe_router_num_groups is None else _GROUPS,
    }


def _read_v3(hub: HubConfig) -> dict[str, Any]:
    hub.only("scoring_func", "sigmoid")
    hub.only("topk_method", "noaux_tc")
    shared = _read_shared(hub)
    divides = hub.take("norm_topk_prob")
    if divides and shared["moe_router_topk"] == 1:
        raise FamilyError(
            f"{hub.where}: norm_topk_prob makes the weight of num_experts_per_tok 1 always 1, so that the router could "
            "not learn; this trainer does not compute that"
        )
    return {
        **shared,
        **_groups(hub, "top2"),
        "rotary_interleaved": hub.take("rope_interleave"),
        "moe_router_score_function": "sigmoid",
        "moe_router_norm_topk_prob": divides,
        "moe_router_enable_expert_bias": True,
        "mtp_num_layers": hub.take("num_nextn_predict_layers", null=0),
    }


def _write_v3(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    return {
        **_write_shared(model, vocab_size, max_positions),
        "scoring_func": "sigmoid",
        "norm_topk_prob": model.moe_router_norm_topk_prob,
        "topk_method": "noaux_tc",
        "rope_interleave": model.rotary_interleaved,
        "num_nextn_predict_layers": model.mtp_num_layers,
    }


def _notes(keys: Mapping[str, Any]) -> Iterator[str]:
    coefficient = keys.get("aux_loss_alpha")
    if coefficient:
        yield (
            f"aux_loss_alpha {coefficient} weighs a balance loss over each sequence; to train with this loss, set "
            f"model.moe_router_load_balancing_type to seq_aux_loss and model.moe_aux_loss_coeff to {coefficient}; an "
            "export keeps the key"
        )


def _weights(model: ModelConfig) -> Iterator[Weight]:
    yield from ends(model)
    for layer in range(model.num_layers):
        yield from _layer(model, layer)
    for layer in _prediction_layers(model):
        for ours, theirs in _PREDICTION:
            yield weight(f"layers.{layer}.{ours}.weight", f"model.layers.{layer}.{theirs}.weight")
        yield from _layer(model, layer)


def _copies(model: ModelConfig) -> Iterator[Weight]:
    """The tables that each published prediction layer holds once more."""
    output = "head.weight" if model.untie_embeddings_and_output_weights else "embedding.word.weight"
    for layer in _prediction_layers(model):
        yield weight("embedding.word.weight", f"model.layers.{layer}.embed_tokens.weight")
        yield weight(output, f"model.layers.{layer}.shared_head.head.weight")


def _prediction_layers(model: ModelConfig) -> range:
    return range(model.num_layers, model.num_layers + model.mtp_num_layers)


def _layer(model: ModelConfig, layer: int) -> Iterator[Weight]:
    yield from norms(layer)
    yield from _attention(model, layer)
    if not model.is_moe_layer(layer):
        yield from mlp(layer)
        return
    ours, theirs = f"layers.{layer}.moe", f"model.layers.{layer}.mlp"
    yield from experts(model, layer, theirs, "gate_proj", "up_proj", "down_proj")
    if model.moe_router_enable_expert_bias:
        bias = f"{theirs}.gate.e_score_correction_bias"
        yield weight(f"{ours}.router.expert_bias", bias, is_parameter=False)
    parts = (f"{theirs}.shared_experts.{part}_proj.weight" for part in ("gate", "up"))
    yield weight(f"{ours}.shared_expert.fc1.weight", *parts, form=Stacked())
    yield weight(f"{ours}.shared_expert.fc2.weight", f"{theirs}.shared_experts.down_proj.weight")


def _attention(model: ModelConfig, layer: int) -> Iterator[Weight]:
    ours, theirs = f"layers.{layer}.attention", f"model.layers.{layer}.self_attn"
    names = {
        "key_value_down": "kv_a_proj_with_mqa",
        "key_value_norm": "kv_a_layernorm",
        "key_value_up": "kv_b_proj",
        "projection": "o_proj",
    }
    if model.q_lora_rank is None:
        names["query"] = "q_proj"
    else:
        names |= {"query_down": "q_a_proj", "query_norm": "q_a_layernorm", "query_up": "q_b_proj"}
    for mine, other in names.items():
        yield from affine(f"{ours}.{mine}", f"{theirs}.{other}", has_bias=False)


_TINY = {
    **TINY,
    "num_key_value_heads": 8,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "original_max_position_embeddings": 16,
    },
}

DEEPSEEK_V2 = Family(
    name="DeepSeek-V2",
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    read_config=_read_v2,
    write_config=_write_v2,
    weights=_weights,
    tiny={**_TINY, "q_lora_rank": None, "topk_method": _GROUPS},
    notes=_notes,
    absent=_ABSENT,
    without_effect=_WITHOUT_EFFECT,
    aliases={"num_experts": "n_routed_experts"},
)

DEEPSEEK_V3 = Family(
    name="DeepSeek-V3",
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    read_config=_read_v3,
    write_config=_write_v3,
    weights=_weights,
    copies=_copies,
    notes=_notes,
    tiny={**_TINY, "num_nextn_predict_layers": 0},
    absent={
        **_ABSENT,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_attention_heads": 128,
        "num_hidden_layers": 61,
        "vocab_size": 129280,
        "first_k_dense_replace": 3,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "rope_interleave": True,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    },
    without_effect=_WITHOUT_EFFECT,
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    refused_tensors={
        r".*\.layers\.\d+\.(eh_proj|enorm|hnorm|shared_head|embed_tokens)\..*": "a part of a layer that predicts "
        "further tokens (MTP), which num_nextn_predict_layers of config.json does not count; correct that number",
    },
)

# Kimi Team 2025 (arXiv:2507.20534), section 2.3. Its files name the class of DeepSeek-V3.
KIMI_K2 = replace(DEEPSEEK_V3, name="Kimi K2", model_type="kimi_k2")

"""The model section of a Megatron-LM run, from the arguments that its checkpoint keeps. Torch-free.

Names: megatron/training/arguments.py. Most keys of our model section are Megatron-LM's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config.sections.model import ModelConfig
from trainer.conversion.errors import ConversionError

_SAME = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "max_position_embeddings"),
    *("rotary_base", "rotary_percent", "rotary_interleaved", "normalization", "norm_epsilon", "apply_layernorm_1p"),
    *("swiglu", "openai_gelu", "squared_relu", "add_qkv_bias", "untie_embeddings_and_output_weights", "qk_layernorm"),
    *("attention_dropout", "hidden_dropout", "init_method_std", "make_vocab_size_divisible_by", "num_experts"),
    *("moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_score_function"),
    *("moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_shared_expert_intermediate_size"),
)
# Argument -> values with which it changes nothing. Any other makes a model that is not carried.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "multi_latent_attention": (False, None),
    "apply_residual_connection_post_layernorm": (False, None),
    "mtp_num_layers": (None, 0),
    "window_size": (None,),
    "softmax_type": ("vanilla", None),
    "qk_l2_norm": (False, None),
    "no_rope_freq": (None,),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "attention_output_gate": (False, None),
    "moe_shared_expert_gate": (False, None),
    "moe_latent_size": (None,),
    "glu_interleave_size": (None,),
    "heterogeneous_layers_config_path": (None,),
    "hybrid_layer_pattern": (None,),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "quick_geglu": (False, None),
    "scale_logits": (False, None),
    "use_mup": (False, None),
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def model_of(arguments: Mapping[str, Any], vocab_size: int, where: str) -> ModelConfig:
    """The model section.

    Args:
        arguments: of the run, by name.
        vocab_size: rows of the word table to keep.
        where: name of the checkpoint, for messages.

    Raises:
        ConversionError: an argument is missing, or makes a model that is not carried.
    """
    for name, neutral in _NEUTRAL.items():
        if arguments.get(name) not in neutral:
            raise ConversionError(
                f"{where}: its run had {name} {arguments[name]!r}, which this trainer does not import"
            )
    missing = next(
        (name for name in ("num_layers", "hidden_size", "num_attention_heads") if name not in arguments), None
    )
    if missing is not None:
        raise ConversionError(f"{where}: its arguments lack {missing}, so that the model is unknown")
    keys = {name: arguments[name] for name in _SAME if arguments.get(name) is not None}
    if arguments.get("layernorm_epsilon") is not None:
        keys["norm_epsilon"] = arguments["layernorm_epsilon"]
    has_bias = arguments.get("add_bias_linear", True)
    if has_bias and arguments.get("bias_gelu_fusion", False) and not (keys.get("swiglu") or keys.get("squared_relu")):
        # The fused op computes the tanh approximation (megatron/core/fusions/fused_bias_gelu.py).
        keys["openai_gelu"] = True
    if arguments.get("group_query_attention"):
        keys["num_query_groups"] = arguments["num_query_groups"]
    # Of the ways to balance the load, sinkhorn alone has scores of its own.
    if arguments.get("moe_router_load_balancing_type") == "sinkhorn":
        keys["moe_router_load_balancing_type"] = "sinkhorn"
    keys |= _positions(arguments, where)
    try:
        return ModelConfig(**keys, disable_bias_linear=not has_bias, vocab_size=vocab_size)
    except ValueError as error:
        raise ConversionError(f"{where}: its arguments make no model: {' '.join(str(error).split())}") from None


def _positions(arguments: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = arguments.get("position_embedding_type", "learned_absolute")
    if arguments.get("use_rotary_position_embeddings"):
        kind = "rope"
    if kind not in ("learned_absolute", "rope", "none"):
        raise ConversionError(
            f"{where}: its run had position_embedding_type {kind!r}, which this trainer does not import"
        )
    if kind == "learned_absolute" and arguments.get("add_position_embedding") is False:
        kind = "none"
    keys: dict[str, Any] = {"position_embedding_type": kind}
    if kind == "rope" and arguments.get("use_rope_scaling"):
        keys["rope_scaling"] = {**_LLAMA3_ROPE, "factor": float(arguments.get("rope_scaling_factor", 8.0))}
    return keys

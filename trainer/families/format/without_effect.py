"""Keys of config.json that change no logit in any family, each under its reason. Torch-free.

A family's own are in its row. A key whose absence would be missed must not be here: see trainer.families.format.
hub_config. An export carries all of them through.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_REASONS: Mapping[str, tuple[str, ...]] = {
    "names the model, its files or the program that wrote it": (
        *("_name_or_path", "_commit_hash", "architectures", "auto_map", "custom_pipelines", "internal_version"),
        *("model_type", "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version"),
    ),
    "says in which dtype the weights are stored, which the files say too": ("dtype", "torch_dtype", "use_bfloat16"),
    "says how the weights are quantized, which the reader of the files checks": ("quantization_config",),
    "chooses a way to compute the same numbers": (
        *("_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal"),
        *("_experts_implementation", "_experts_implementation_internal", "_flash_attn_2_enabled"),
        *("attn_implementation", "cache_implementation", "chunk_size_feed_forward", "gradient_checkpointing"),
        *("pretraining_tp", "torchscript", "use_cache", "use_flash_attention", "use_flash_attention_2"),
        *("use_flash_attn", "use_reentrant", "xla_device"),
    ),
    "chooses what a call of the library returns": (
        *("keys_to_ignore_at_inference", "output_attentions", "output_hidden_states", "output_past"),
        *("output_router_logits", "output_scores", "return_dict", "return_dict_in_generate"),
        "tie_last_hidden_states",
    ),
    "is about the tokenizer": (
        *("model_max_length", "padding_side", "tokenizer_class", "tokenizer_model_max_length"),
        *("tokenizer_padding_side", "tokenizer_type", "vocab_file"),
    ),
    "is about the ids of tokens": (
        *("begin_suppress_tokens", "bos_token_id", "cls_token_id", "decoder_start_token_id", "eos_token_id"),
        "eos_token_ids",
        *("forced_bos_token_id", "forced_eos_token_id", "mask_token_id", "pad_token_id", "sep_token_id"),
        *("suppress_tokens", "unk_token_id"),
    ),
    "is about generation": (
        *("bad_words_ids", "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size"),
        *("exponential_decay_length_penalty", "length_penalty", "max_length", "max_new_tokens", "min_length"),
        *("no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "prefix"),
        *("remove_invalid_values", "repetition_penalty", "task_specific_params", "temperature", "top_k", "top_p"),
        "typical_p",
    ),
    "is about heads for other tasks": (
        *("_num_labels", "classifier_dropout", "finetuning_task", "id2label", "label2id", "num_labels"),
        "problem_type",
        "tf_legacy_loss",
    ),
}

WITHOUT_EFFECT: Mapping[str, str] = {key: reason for reason, keys in _REASONS.items() for key in keys}
"""Key -> the reason, which follows the key in a sentence."""

OFF: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False, None),
    "attention_bias": (False, None),
    "attn_logit_softcapping": (None,),
    "cross_attention_hidden_size": (None,),
    "final_logit_softcapping": (None,),
    "is_decoder": (False, True, None),
    "is_encoder_decoder": (False, None),
    "layer_types": (None,),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "per_layer_config": (None, {}),
    "pruned_heads": ({}, None),
    "qk_layernorm": (False, None),
    "rope_parameters": (None,),
    "rope_scaling": (None,),
    "router_jitter_noise": (0.0, None),
    "sliding_window": (None,),
    "tie_encoder_decoder": (False, None),
    "use_bidirectional_attention": (False, None),
    "use_qk_norm": (False, None),
    "use_sliding_window": (False, None),
}
"""Key of a part that not every family has -> the values that leave it out. A family that has the part reads the key."""

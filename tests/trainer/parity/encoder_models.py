"""Model sections of parity cases with an encoder, BERT and T5, whose layouts are in test files of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BERT = {
    "architecture": "bert",
    "num_attention_heads": 8,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}
# test_bert.py has their layouts.
ENCODERS: Mapping[str, Mapping[str, Any]] = {
    # Devlin et al.: norms after the adds, one behind the embeddings, none at the end.
    "bert": {**_BERT, "norm_placement": "post", "has_final_norm": False},
    # Megatron-LM's: norms before the sublayers; no dropout, so that torch's fused attention runs.
    "megatron-bert": {**_BERT, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    # The masked tokens alone.
    "masked-only": {**_BERT, "bert_binary_head": False, "untie_embeddings_and_output_weights": True},
}

_T5 = {
    "architecture": "t5",
    "num_layers": 2,
    "decoder_num_layers": 3,
    "num_attention_heads": 8,
    "ffn_hidden_size": 48,
    "position_embedding_type": "relative",
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "softmax_scale": 1.0,
    "normalization": "RMSNorm",
    "activation_func": "gelu_tanh",
    "gated_linear_unit": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}
_MEGATRON_T5 = {
    "architecture": "t5",
    "num_layers": 2,
    "decoder_num_layers": 3,
    "num_attention_heads": 8,
    "ffn_hidden_size": 48,
    "add_head_bias": True,
    "scale_decoder_output": False,
    "stack_output_dropout": False,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}
# test_encoder_decoder.py has their layouts.
ENCODER_DECODERS: Mapping[str, Mapping[str, Any]] = {
    "t5": _T5,
    # A tied table, which gets three gradients; no dropout, so that torch's fused attention runs.
    "t5-tied": {
        **_T5,
        "untie_embeddings_and_output_weights": False,
        "activation_func": "relu",
        "gated_linear_unit": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    # Megatron-LM's: a table of learned positions for both stacks, biases, and an output bias on the tied table.
    "megatron-t5": _MEGATRON_T5,
    # Rotated queries and keys; no dropout, so that the decoder's attention to itself is torch's causal one.
    "t5-rope": {
        **_MEGATRON_T5,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
}

"""Refused combinations of the keys of architecture t5, and its keys for another architecture."""

from __future__ import annotations

from typing import Any

T5 = {"architecture": "t5", "position_embedding_type": "relative", "disable_bias_linear": True}
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
SHARDING = "data_parallel_sharding_strategy"

# as REFUSED in tests.trainer.planning.refused_combinations
REFUSED_ENCODER_DECODERS: list[tuple[dict[str, dict[str, Any]], str, str, dict[str, dict[str, Any]]]] = [
    (
        {"model": {"position_embedding_type": "relative"}},
        "model.position_embedding_type",
        "relative needs model.architecture t5",
        {"model": T5},
    ),
    *(
        (
            {section: {key: value}},
            f"{section}.{key}",
            "needs model.architecture t5",
            {"model": T5, section: {**(T5 if section == "model" else {}), key: value}},
        )
        for section, key, value in (
            ("model", "decoder_num_layers", 2),
            ("model", "relative_attention_num_buckets", 8),
            ("model", "relative_attention_max_distance", 64),
            ("model", "scale_decoder_output", False),
            ("model", "stack_output_dropout", False),
            ("training", "decoder_seq_length", 32),
        )
    ),
    (
        {"model": {**T5, "position_embedding_type": "alibi"}},
        "model.position_embedding_type",
        "alibi is not available for model.architecture t5; use relative, learned_absolute or rope",
        {"model": T5},
    ),
    (
        {"model": {**T5, "position_embedding_type": "rope", "relative_attention_num_buckets": 8}},
        "model.relative_attention_num_buckets",
        "needs position_embedding_type relative",
        {"model": {**T5, "relative_attention_num_buckets": 8}},
    ),
    (
        {"model": {"architecture": "t5", "max_position_embeddings": 100}, "training": {"seq_length": 64}},
        "training.decoder_seq_length",
        "128 is above model.max_position_embeddings 100; lower it, or raise max_position_embeddings",
        {"model": {"max_position_embeddings": 128}},
    ),
    (
        {"model": {**T5, "norm_placement": "post"}},
        "model.norm_placement",
        "has no meaning for model.architecture t5",
        {"model": {**T5, "norm_placement": "pre"}},
    ),
    (
        {"model": {**T5, "relative_attention_num_buckets": 7}},
        "model.relative_attention_num_buckets",
        "7 is not an even number",
        {"model": {**T5, "relative_attention_num_buckets": 8}},
    ),
    (
        {"model": {**T5, "relative_attention_max_distance": 16}},
        "model.relative_attention_max_distance",
        "use 17 or more",
        {"model": {**T5, "relative_attention_max_distance": 17}},
    ),
    (
        {"model": T5, "parallel": {PP: 2}},
        f"parallel.{PP}",
        "whose decoder layers all read the encoder's output",
        {"parallel": {PP: 1}},
    ),
    (
        {"model": T5, "parallel": {SHARDING: "optim_grads"}},
        f"parallel.{SHARDING}",
        "whose stacks share the word table; use optim",
        {"parallel": {SHARDING: "optim"}},
    ),
    (
        {"model": T5, "parallel": {TP: 4, "sequence_parallel": True}, "training": {"decoder_seq_length": 30}},
        "training.decoder_seq_length",
        "use 28 or 32, or switch parallel.sequence_parallel off",
        {"training": {"decoder_seq_length": 32}},
    ),
]

"""Refused combinations of BERT's keys."""

from __future__ import annotations

from typing import Any

_BERT = {"architecture": "bert"}
_POST = {**_BERT, "norm_placement": "post"}
_LATENT = {
    **_BERT,
    "multi_latent_attention": True,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "position_embedding_type": "rope",
}
Refused = tuple[dict[str, dict[str, Any]], str, str, dict[str, dict[str, Any]]]


def _with_bert(section: str, key: str, value: Any, says: str, **more: Any) -> Refused:
    """A key that BERT does not have."""
    asked: dict[str, dict[str, Any]] = {"model": dict(_BERT)}
    asked[section] = {**asked.get(section, {}), key: value, **more}
    return asked, f"{section}.{key}", says, {"model": {"architecture": "decoder"}}


# as REFUSED in tests.trainer.planning.refused_combinations
REFUSED_BERT: list[Refused] = [
    *(
        ({section: {key: value}}, f"{section}.{key}", "needs model.architecture bert", {"model": _BERT})
        for section, key, value in (
            ("model", "num_tokentypes", 2),
            ("model", "bert_binary_head", False),
        )
    ),
    *(
        ({"data": {key: 0.2}}, f"data.{key}", "needs model.architecture bert or t5", {"model": _BERT})
        for key in ("mask_prob", "short_seq_prob")
    ),
    _with_bert(
        "parallel", "sequence_parallel", True, "the first token of whole sequences", tensor_model_parallel_size=2
    ),
    _with_bert("model", "num_experts", 4, "without experts"),
    ({"model": _LATENT}, "model.multi_latent_attention", "no latent attention", {"model": {"architecture": "decoder"}}),
    _with_bert("model", "embedding_size", 16, "as wide as the hidden size"),
    _with_bert("model", "embedding_layer_norm", True, "follows the sum of the embeddings"),
    _with_bert("model", "mup_base_hidden_size", 8, "no rule by width"),
    _with_bert("model", "swiglu", True, "has no gates"),
    _with_bert("model", "gated_linear_unit", True, "has no gates"),
    _with_bert("data", "streaming", True, "--split-sentences", tokenizer_model="tokenizer.json"),
    _with_bert("data", "sample_packing", True, "sentences of one document"),
    _with_bert("data", "eod_mask_loss", True, "no end of a document"),
    _with_bert("data", "reset_attention_mask", True, "hold one document"),
    _with_bert("data", "reset_position_ids", True, "hold one document"),
    (
        {"model": {**_BERT, "num_tokentypes": 1}},
        "model.num_tokentypes",
        "must be 2 or more with bert_binary_head",
        {"model": {"num_tokentypes": 2}},
    ),
    (
        {"model": {**_BERT, "position_embedding_type": "alibi"}},
        "model.position_embedding_type",
        "alibi needs causal attention",
        {"model": {"architecture": "decoder"}},
    ),
    (
        {"model": {**_BERT, "norm_placement": "sandwich"}},
        "model.norm_placement",
        "must be post (BERT) or pre",
        {"model": {"norm_placement": "pre"}},
    ),
    ({"model": _POST}, "model.has_final_norm", "off with post", {"model": {"has_final_norm": False}}),
    (
        {"model": {**_BERT, "attention_backend": "flash"}},
        "model.attention_backend",
        "flash has no padding mask",
        {"model": {"attention_backend": "fused"}},
    ),
]

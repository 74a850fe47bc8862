"""BERT, and Megatron-LM's BERT with norms before each sublayer. Torch-free.

Devlin et al. 2018 (arXiv:1810.04805), section 3; Shoeybi et al. 2019 (arXiv:1909.08053), section 5.3 and figure 7, for
the order of the norms. Names: transformers models/bert/modeling_bert.py and models/megatron_bert. Files of the bare
encoder lack the heads: sentence encoders such as all-MiniLM-L6-v2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer.families.format.family import Family, Weight, affine, weight
from trainer.families.format.forms import SeparateHeads
from trainer.families.format.hub_config import HubConfig
from trainer.families.gpt2 import activation_name, read_activation

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

_BERT = {
    "embedding.norm": "bert.embeddings.LayerNorm",
    "attention_norm": "attention.output.LayerNorm",
    "mlp_norm": "output.LayerNorm",
}
_MEGATRON = {"final_norm": "bert.encoder.ln", "attention_norm": "attention.ln", "mlp_norm": "ln"}


def _read(placement: str, masked_only: str, hub: HubConfig) -> dict[str, Any]:
    hub.only("position_embedding_type", "absolute")
    hub.only("is_decoder", False)
    return {
        "architecture": "bert",
        "bert_binary_head": masked_only not in (hub.given("architectures") or []),
        "num_layers": hub.need("num_hidden_layers"),
        "hidden_size": hub.need("hidden_size"),
        "num_attention_heads": hub.need("num_attention_heads"),
        "ffn_hidden_size": hub.need("intermediate_size"),
        "max_position_embeddings": hub.take("max_position_embeddings"),
        "num_tokentypes": hub.take("type_vocab_size"),
        "vocab_size": hub.need("vocab_size"),
        "norm_placement": placement,
        "has_final_norm": placement == "pre",
        "norm_epsilon": hub.take("layer_norm_eps"),
        "activation_func": read_activation(hub, "hidden_act"),
        "attention_dropout": hub.take("attention_probs_dropout_prob"),
        "hidden_dropout": hub.take("hidden_dropout_prob"),
        "init_method_std": hub.take("initializer_range"),
        "untie_embeddings_and_output_weights": not hub.take("tie_word_embeddings"),
    }


def _write(masked_only: str, model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    keys = {
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.ffn_size,
        "max_position_embeddings": max_positions,
        "type_vocab_size": model.token_types,
        "layer_norm_eps": model.norm_epsilon,
        "hidden_act": activation_name(model),
        "attention_probs_dropout_prob": model.attention_dropout,
        "hidden_dropout_prob": model.hidden_dropout,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
    }
    return keys if model.bert_binary_head else {**keys, "architectures": [masked_only]}


def _weights(norms: Mapping[str, str], model: ModelConfig) -> Iterator[Weight]:
    for what in ("word", "position", "token_type"):
        yield weight(f"embedding.{what}.weight", f"bert.embeddings.{what}_embeddings.weight")
    for end in ("embedding.norm", "final_norm"):
        if end in norms:
            yield from affine(end, norms[end], has_bias=True)
    for layer in range(model.num_layers):
        yield from _layer(norms, model, f"layers.{layer}", f"bert.encoder.layer.{layer}")
    yield from affine("head.transform", "cls.predictions.transform.dense", has_bias=True)
    yield from affine("head.norm", "cls.predictions.transform.LayerNorm", has_bias=True)
    if model.untie_embeddings_and_output_weights:
        yield weight("head.weight", "cls.predictions.decoder.weight")
    yield weight("head.bias", "cls.predictions.bias")
    if model.bert_binary_head:
        yield from affine("head.pooler", "bert.pooler.dense", has_bias=True)
        yield from affine("head.binary", "cls.seq_relationship", has_bias=True)


def _layer(norms: Mapping[str, str], model: ModelConfig, ours: str, theirs: str) -> Iterator[Weight]:
    heads = SeparateHeads(model.query_groups, 1, model.head_dim)
    for what in ("weight", "bias"):
        parts = (f"{theirs}.attention.self.{part}.{what}" for part in ("query", "key", "value"))
        yield weight(f"{ours}.attention.qkv.{what}", *parts, form=heads)
    pairs = {
        "attention.projection": "attention.output.dense",
        "attention_norm": norms["attention_norm"],
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
        "mlp_norm": norms["mlp_norm"],
    }
    for mine, other in pairs.items():
        yield from affine(f"{ours}.{mine}", f"{theirs}.{other}", has_bias=True)


def _correct(whole: str, masked_only: str, keys: Mapping[str, Any], stored: Collection[str]) -> Mapping[str, Any]:
    """The architecture that the tensors make: published files with both heads name only one of them."""
    predicts = any(name.startswith("cls.predictions.") for name in stored)
    has_order = any(name.startswith("cls.seq_relationship.") for name in stored)
    return {**keys, "architectures": [masked_only if predicts and not has_order else whole]}


_ABSENT: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "vocab_size": 30522,
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "is_decoder": False,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "type_vocab_size": 2,
}
_ABSENT_MEGATRON = {
    **_ABSENT,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "vocab_size": 29056,
}
_POOLER = ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")
_WITHOUT_EFFECT = dict.fromkeys(
    ("directionality", *(f"pooler_{what}" for what in _POOLER)),
    "is not read by the class of transformers; Google's files have it",
)


def _family(
    name: str, model_type: str, prefix: str, placement: str, norms: Mapping[str, str], absent: Mapping[str, Any]
) -> Family:
    whole, masked_only, bare = (f"{prefix}{what}" for what in ("ForPreTraining", "ForMaskedLM", "Model"))
    return Family(
        name=name,
        model_type=model_type,
        architecture=whole,
        read_config=partial(_read, placement, masked_only),
        write_config=partial(_write, masked_only),
        weights=partial(_weights, norms),
        tiny={
            "vocab_size": 101,
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "intermediate_size": 48,
            "max_position_embeddings": 64,
        },
        absent=absent,
        without_effect=_WITHOUT_EFFECT,
        other_architectures=(masked_only, bare),
        base_prefix="bert.",
        # Positions were once stored with the weights; the output table is the word table, and its bias stands twice.
        ignored_tensors=(r"(bert\.)?embeddings\.position_ids", r"cls\.predictions\.decoder\.(weight|bias)"),
        auto_class="AutoModelForPreTraining",
        heads=(r"cls\.predictions\..*", r"bert\.pooler\..*", r"cls\.seq_relationship\..*"),
        correct_config=partial(_correct, whole, masked_only),
    )


BERT = _family("BERT", "bert", "Bert", "post", _BERT, _ABSENT)
MEGATRON_BERT = _family("Megatron-LM BERT", "megatron-bert", "MegatronBert", "pre", _MEGATRON, _ABSENT_MEGATRON)

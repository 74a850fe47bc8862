"""StarCoder2: rotary positions and groups of queries, with LayerNorm, biases and no gates. Torch-free.

Lozhkov et al. 2024 (arXiv:2402.19173), section 5; names: transformers models/starcoder2/modeling_starcoder2.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer.families.format.family import Family, Weight, affine, weight
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope, write_rope
from trainer.families.gpt2 import activation_name, dropout_notes, read_activation
from trainer.families.llama import TINY, attention

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


def _read(hub: HubConfig) -> dict[str, Any]:
    heads = hub.need("num_attention_heads")
    window = hub.take("sliding_window", null=None)
    return {
        "num_layers": hub.need("num_hidden_layers"),
        "hidden_size": hub.need("hidden_size"),
        "num_attention_heads": heads,
        "num_query_groups": hub.take("num_key_value_heads", null=heads),
        "ffn_hidden_size": hub.need("intermediate_size"),
        "max_position_embeddings": hub.take("max_position_embeddings"),
        "vocab_size": hub.need("vocab_size"),
        "norm_epsilon": hub.take("norm_epsilon"),
        "activation_func": read_activation(hub, "hidden_act"),
        "disable_bias_linear": not hub.take("use_bias"),
        "attention_dropout": hub.take("attention_dropout"),
        "hidden_dropout": hub.take("residual_dropout"),
        "init_method_std": hub.take("initializer_range"),
        "untie_embeddings_and_output_weights": not hub.take("tie_word_embeddings"),
        **({} if window is None else {"window_size": window}),
        **read_rope(hub),
    }


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "intermediate_size": model.ffn_size,
        "max_position_embeddings": max_positions,
        "norm_epsilon": model.norm_epsilon,
        "hidden_act": activation_name(model),
        "use_bias": not model.disable_bias_linear,
        "attention_dropout": model.attention_dropout,
        "residual_dropout": model.hidden_dropout,
        "embedding_dropout": model.hidden_dropout,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "sliding_window": model.window_size if model.window_layers == "all" else None,
        **write_rope(model),
    }


def _weights(model: ModelConfig) -> Iterator[Weight]:
    yield weight("embedding.word.weight", "model.embed_tokens.weight")
    yield from affine("final_norm", "model.norm", has_bias=True)
    if model.untie_embeddings_and_output_weights:
        yield weight("head.weight", "lm_head.weight")
    biased = not model.disable_bias_linear
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        yield from attention(model, layer)
        yield from affine(f"{ours}.attention_norm", f"{theirs}.input_layernorm", has_bias=True)
        yield from affine(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm", has_bias=True)
        yield from affine(f"{ours}.mlp.fc1", f"{theirs}.mlp.c_fc", has_bias=biased)
        yield from affine(f"{ours}.mlp.fc2", f"{theirs}.mlp.c_proj", has_bias=biased)


STARCODER2 = Family(
    name="StarCoder2",
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=_weights,
    tiny={
        **{key: value for key, value in TINY.items() if key not in ("rms_norm_eps", "tie_word_embeddings")},
        "sliding_window": 5,
    },
    notes=partial(dropout_notes, residual_key="residual_dropout", embedding_key="embedding_dropout"),
    absent={
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_attention_heads": 24,
        "num_hidden_layers": 30,
        "vocab_size": 49152,
        "attention_dropout": 0.0,
        "hidden_act": "gelu_pytorch_tanh",
        "initializer_range": 0.018042,
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "num_key_value_heads": 2,
        "residual_dropout": 0.0,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_bias": True,
    },
    without_effect={
        "embedding_dropout": "is a rate of dropout, which a note tells",
        **dict.fromkeys(
            (
                *("activation_function", "attention_softmax_in_fp32", "layer_norm_epsilon", "mlp_type", "norm_type"),
                *("scale_attention_softmax_in_fp32", "scale_attn_weights"),
            ),
            "is not read by the class of transformers",
        ),
    },
)

"""GPT-2. Torch-free.

Radford et al. 2019, section 2.3; names: transformers models/gpt2/modeling_gpt2.py, whose matrices are [in, out].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainer.families.format.family import Family, Weight, affine, weight
from trainer.families.format.forms import JoinedHeads, Transposed
from trainer.families.format.hub_config import HubConfig

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

ACTIVATIONS = {
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate"), "gelu_tanh"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    "relu": "relu",
}
"""Hugging Face's name -> ours; an export takes the first name of each."""


def activation_name(model: ModelConfig) -> str:
    """Hugging Face's name of the model's activation; another's for one that no family here has, which reads back so."""
    return next((name for name, ours in ACTIVATIONS.items() if ours == model.activation), "gelu_new")


def read_activation(hub: HubConfig, key: str) -> str:
    """Our name of the activation under ``key``."""
    return ACTIVATIONS[hub.only(key, *ACTIVATIONS)]


def dropout_notes(
    keys: Mapping[str, Any], residual_key: str = "resid_pdrop", embedding_key: str = "embd_pdrop"
) -> Iterator[str]:
    """One sentence if the embedding has another rate of dropout than the residual stream."""
    residual, embedding = keys.get(residual_key), keys.get(embedding_key)
    if residual is not None and embedding is not None and residual != embedding:
        yield (
            f"{embedding_key} {embedding} differs from {residual_key} {residual}, but this trainer has one rate, "
            f"model.hidden_dropout, which is {residual} here; it changes training, but no logit"
        )


def _read(hub: HubConfig) -> dict[str, Any]:
    hub.only("scale_attn_weights", True)
    hub.only("scale_attn_by_inverse_layer_idx", False)
    hidden = hub.need("n_embd")
    return {
        "num_layers": hub.need("n_layer"),
        "hidden_size": hidden,
        "num_attention_heads": hub.need("n_head"),
        "ffn_hidden_size": hub.take("n_inner", null=4 * hidden),
        "max_position_embeddings": hub.take("n_positions"),
        "vocab_size": hub.need("vocab_size"),
        "norm_epsilon": hub.take("layer_norm_epsilon"),
        "activation_func": read_activation(hub, "activation_function"),
        "attention_dropout": hub.take("attn_pdrop"),
        "hidden_dropout": hub.take("resid_pdrop"),
        "init_method_std": hub.take("initializer_range"),
        "untie_embeddings_and_output_weights": not hub.take("tie_word_embeddings"),
    }


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "n_positions": max_positions,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": None if model.ffn_size == 4 * model.hidden_size else model.ffn_size,
        "activation_function": activation_name(model),
        "layer_norm_epsilon": model.norm_epsilon,
        "attn_pdrop": model.attention_dropout,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
    }


def _weights(model: ModelConfig) -> Iterator[Weight]:
    yield weight("embedding.word.weight", "transformer.wte.weight")
    yield weight("embedding.position.weight", "transformer.wpe.weight")
    yield from affine("final_norm", "transformer.ln_f", has_bias=True)
    if model.untie_embeddings_and_output_weights:
        yield weight("head.weight", "lm_head.weight")
    heads = JoinedHeads(model.query_groups, 1, model.head_dim, transposed=True)
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"transformer.h.{layer}"
        yield from affine(f"{ours}.attention_norm", f"{theirs}.ln_1", has_bias=True)
        yield from affine(f"{ours}.attention.qkv", f"{theirs}.attn.c_attn", has_bias=True, form=heads)
        yield from affine(f"{ours}.attention.projection", f"{theirs}.attn.c_proj", has_bias=True, form=Transposed())
        yield from affine(f"{ours}.mlp_norm", f"{theirs}.ln_2", has_bias=True)
        yield from affine(f"{ours}.mlp.fc1", f"{theirs}.mlp.c_fc", has_bias=True, form=Transposed())
        yield from affine(f"{ours}.mlp.fc2", f"{theirs}.mlp.c_proj", has_bias=True, form=Transposed())


GPT2 = Family(
    name="GPT-2",
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    read_config=_read,
    write_config=_write,
    weights=_weights,
    tiny={"vocab_size": 101, "n_positions": 64, "n_embd": 32, "n_layer": 4, "n_head": 8},
    base_prefix="transformer.",
    # The causal mask was once stored with the weights.
    ignored_tensors=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
    notes=dropout_notes,
    absent={
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "vocab_size": 50257,
        "activation_function": "gelu_new",
        "attn_pdrop": 0.1,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "n_inner": None,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
    },
    without_effect={
        "embd_pdrop": "is a rate of dropout, which a note tells",
        "n_ctx": "repeats n_positions",
        "reorder_and_upcast_attn": "changes rounding alone; scores are computed in float32 here",
        **dict.fromkeys(
            (f"summary_{what}" for what in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")),
            "is about heads for other tasks",
        ),
        **dict.fromkeys(("n_special", "predict_special_tokens"), "is of the first class for GPT, and empty"),
    },
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
)

"""Granite 3, and 4 without state-space layers: Llama with four multipliers. Torch-free.

IBM 2024, Granite 3.0 language models, section 2; names: transformers models/granite and models/granitemoehybrid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer.config.sections.scales import logits_divisor, score_scale
from trainer.families.format.errors import FamilyError
from trainer.families.format.family import Family, Weight, affine, weight
from trainer.families.format.forms import Joined
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope
from trainer.families.format.windows import FULL
from trainer.families.llama import (
    ABSENT,
    SILU,
    TINY,
    attention,
    dense_weights,
    ends,
    norms,
    read_shape,
    write_shape,
)

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


def _read(hub: HubConfig) -> dict[str, Any]:
    hub.only("hidden_act", *SILU)
    hub.only("mlp_bias", False)
    biased, embedding = hub.take("attention_bias"), hub.take("embedding_multiplier")
    return {
        **read_shape(hub),
        **read_rope(hub),
        "add_qkv_bias": biased,
        "add_attention_output_bias": biased,
        "embedding_scale": None if embedding == 1.0 else embedding,
        "softmax_scale": hub.take("attention_multiplier"),
        "residual_multiplier": hub.take("residual_multiplier"),
        "logits_scaling": hub.take("logits_scaling"),
    }


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    return {
        **write_shape(model, vocab_size, max_positions),
        "hidden_act": "silu",
        "attention_bias": model.has_qkv_bias,
        "mlp_bias": False,
        "embedding_multiplier": model.embedding_scale or 1.0,
        "attention_multiplier": score_scale(model),
        "residual_multiplier": model.residual_multiplier,
        "logits_scaling": logits_divisor(model),
    }


GRANITE = Family(
    name="Granite",
    model_type="granite",
    architecture="GraniteForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=dense_weights,
    tiny={
        **TINY,
        "tie_word_embeddings": True,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.5,
    },
    absent={
        **ABSENT,
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
    },
)


def _read_dense_granite4(hub: HubConfig) -> dict[str, Any]:
    # mamba and attention are the names of transformers 4.
    layers, count = hub.given("layer_types"), hub.need("num_hidden_layers")
    if not isinstance(layers, list) or not all(layer in ("attention", FULL) for layer in layers):
        raise FamilyError(
            f"{hub.where}: model_type 'granitemoehybrid' has state-space layers, which this trainer does not compute; "
            "take a Granite 4 whose layer_types are all attention, such as granite-4.0-350m, or a Granite 3"
        )
    if len(layers) != count:
        hub.refuse(f"layer_types has {len(layers)} entries, but num_hidden_layers is {count}")
    hub.only("num_local_experts", 0)
    if hub.given("position_embedding_type") != "rope":
        hub.refuse(
            "position_embedding_type is not 'rope', without which no layer rotates; this trainer computes only rope"
        )
    return {**_read(hub), "ffn_hidden_size": hub.need("shared_intermediate_size")}


def _dense_granite4_weights(model: ModelConfig) -> Iterator[Weight]:
    yield from ends(model)
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}.mlp", f"model.layers.{layer}.shared_mlp"
        yield from norms(layer)
        yield from attention(model, layer)
        yield weight(f"{ours}.fc1.weight", f"{theirs}.input_linear.weight", form=Joined())
        yield from affine(f"{ours}.fc2", f"{theirs}.output_linear", has_bias=False)


_MAMBA = ("chunk_size", "conv_bias", "d_conv", "d_head", "d_state", "expand", "n_groups", "n_heads", "proj_bias")
DENSE_GRANITE4 = replace(
    GRANITE,
    name="Granite 4",
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    read_config=_read_dense_granite4,
    weights=_dense_granite4_weights,
    tiny={
        **GRANITE.tiny,
        "shared_intermediate_size": 48,
        "layer_types": ["attention"] * 4,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "mamba_n_heads": 4,
    },
    absent={
        **GRANITE.absent,
        "layer_types": None,
        "num_local_experts": 8,
        "position_embedding_type": None,
        "shared_intermediate_size": 1024,
    },
    without_effect={
        **dict.fromkeys((*(f"mamba_{what}" for what in _MAMBA), "time_step_limit"), "is about state-space layers"),
        **dict.fromkeys(("num_experts_per_tok", "router_aux_loss_coef"), "is about experts"),
        "init_method": "is about random weights",
        "normalization_function": "is not read by the class of transformers, whose norms are RMSNorm",
    },
    aliases={"layers_block_type": "layer_types"},
)

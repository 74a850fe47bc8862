"""Phi-3, 3.5 and 4: Llama with joined matrices, and longrope for long contexts. Torch-free.

Abdin et al. 2024 (arXiv:2404.14219), section 2; names: transformers models/phi3/modeling_phi3.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer.families.format.family import Family, Weight, affine, weight
from trainer.families.format.forms import Joined, JoinedHeads
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.rope import read_rope
from trainer.families.gpt2 import dropout_notes
from trainer.families.llama import ABSENT, SILU, TINY, ends, norms, read_shape, write_shape

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig

_OLD_LENGTH = "original_max_position_embeddings"


def _read(hub: HubConfig) -> dict[str, Any]:
    hub.only("hidden_act", *SILU)
    # Keys of Phi-4-mini, which only Microsoft's own code knows.
    for key, value in (("full_attn_mod", 1), ("interpolate_factor", 1), ("lm_head_bias", False)):
        hub.only(key, value)
    window = hub.take("sliding_window", null=None)
    rope = read_rope(
        hub,
        percent_key="partial_rotary_factor",
        old_length_key=_OLD_LENGTH,
        # What the first files call longrope; the class of transformers has no other scaling.
        other_types={"su": "longrope", "yarn": "longrope"},
    )
    hub.take(_OLD_LENGTH)
    scaling = rope.get("rope_scaling")
    if scaling and scaling["rope_type"] != "longrope":
        hub.refuse(f"rope_type is {scaling['rope_type']!r}, but transformers computes only 'longrope' in this family")
    return {
        **read_shape(hub),
        **rope,
        "hidden_dropout": hub.take("resid_pdrop"),
        **({} if window is None else {"window_size": window}),
    }


def _write(model: ModelConfig, vocab_size: int, max_positions: int) -> dict[str, Any]:
    keys = {
        **write_shape(model, vocab_size, max_positions),
        "hidden_act": "silu",
        "partial_rotary_factor": model.rotary_percent,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "sliding_window": model.window_size if model.window_layers == "all" else None,
    }
    scaling = model.rope_scaling
    if scaling and scaling.get("rope_type") == "longrope" and scaling.get(_OLD_LENGTH):
        keys[_OLD_LENGTH] = old = scaling[_OLD_LENGTH]
        # transformers 4 takes three keys alone, whose type is called so, and computes the factor.
        left_out = {"rope_type", _OLD_LENGTH, *(["factor"] if scaling.get("factor") == max_positions / old else [])}
        numbers = {key: value for key, value in scaling.items() if key not in left_out}
        keys["rope_scaling"] = {"type": "longrope", **numbers}
        rotated = {"rope_theta": model.rotary_base, "partial_rotary_factor": model.rotary_percent}
        keys["rope_parameters"] = {"rope_type": "longrope", **numbers, **rotated}
    return keys


def _weights(model: ModelConfig) -> Iterator[Weight]:
    yield from ends(model)
    heads = JoinedHeads(model.query_groups, model.num_attention_heads // model.query_groups, model.head_dim)
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        yield from norms(layer)
        yield weight(f"{ours}.attention.qkv.weight", f"{theirs}.self_attn.qkv_proj.weight", form=heads)
        yield from affine(f"{ours}.attention.projection", f"{theirs}.self_attn.o_proj", has_bias=False)
        yield weight(f"{ours}.mlp.fc1.weight", f"{theirs}.mlp.gate_up_proj.weight", form=Joined())
        yield from affine(f"{ours}.mlp.fc2", f"{theirs}.mlp.down_proj", has_bias=False)


PHI3 = Family(
    name="Phi-3",
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    read_config=_read,
    write_config=_write,
    weights=_weights,
    tiny={
        **TINY,
        "hidden_size": 64,
        "partial_rotary_factor": 0.75,
        "max_position_embeddings": 128,
        _OLD_LENGTH: 64,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.25, 1.5], "long_factor": [1.5, 4.0, 9.0]},
    },
    notes=dropout_notes,
    absent={
        **ABSENT,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        _OLD_LENGTH: 4096,
        "partial_rotary_factor": 1.0,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "vocab_size": 32064,
    },
    without_effect={"embd_pdrop": "is a rate of dropout, which a note tells"},
)

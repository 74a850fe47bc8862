"""The families that can be imported and exported: one row each. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from trainer.config.sections.model import ModelConfig
from trainer.config.sections.scales import logits_divisor, score_scale
from trainer.families.bert import BERT, MEGATRON_BERT
from trainer.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2
from trainer.families.dense.bloom import BLOOM
from trainer.families.dense.gemma import GEMMA
from trainer.families.dense.glm4 import GLM, GLM4
from trainer.families.dense.granite import DENSE_GRANITE4, GRANITE
from trainer.families.dense.ministral import MINISTRAL, MINISTRAL3
from trainer.families.dense.olmo3 import OLMO3
from trainer.families.dense.phi3 import PHI3
from trainer.families.dense.seed_oss import SEED_OSS
from trainer.families.dense.smollm3 import SMOLLM3
from trainer.families.dense.starcoder2 import STARCODER2
from trainer.families.format.errors import FamilyError
from trainer.families.format.family import Family
from trainer.families.format.hub_config import HubConfig
from trainer.families.format.not_read import reason
from trainer.families.gemma2 import GEMMA2
from trainer.families.gemma3 import GEMMA3
from trainer.families.gpt2 import GPT2
from trainer.families.gpt_neox import GPT_NEOX
from trainer.families.gpt_oss import GPT_OSS
from trainer.families.llama import INTERNLM3, LLAMA
from trainer.families.mistral import MISTRAL
from trainer.families.mixtral import MIXTRAL
from trainer.families.mixtures.olmoe import OLMOE
from trainer.families.mixtures.qwen2_moe import QWEN2_MOE
from trainer.families.olmo2 import OLMO2
from trainer.families.opt import OPT
from trainer.families.phi import PHI
from trainer.families.qwen2 import QWEN2
from trainer.families.qwen3 import QWEN3
from trainer.families.qwen3_moe import QWEN3_MOE
from trainer.families.t5 import MT5, T5

# In this order a model section is described: Llama before the families that have Llama's layers under another name.
FAMILIES: tuple[Family, ...] = (
    GPT2,
    OPT,
    BLOOM,
    GPT_NEOX,
    PHI,
    LLAMA,
    MISTRAL,
    MINISTRAL,
    MINISTRAL3,
    MIXTRAL,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    GEMMA,
    GEMMA2,
    GEMMA3,
    OLMO2,
    OLMO3,
    OLMOE,
    GLM,
    GLM4,
    GRANITE,
    SMOLLM3,
    SEED_OSS,
    STARCODER2,
    PHI3,
    GPT_OSS,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    BERT,
    MEGATRON_BERT,
    T5,
)

# Families whose models an export writes under the name of another.
OTHER_NAMES: tuple[Family, ...] = (INTERNLM3, DENSE_GRANITE4, KIMI_K2, MT5)


def family_of_config(keys: Mapping[str, Any], where: str) -> Family:
    """The family of a config.json.

    Args:
        keys: content of the file.
        where: name of the file, for messages.

    Raises:
        FamilyError: no family has this model type, or the architecture is none of the family's.
    """
    model_type = keys.get("model_type")
    found = next((family for family in (*FAMILIES, *OTHER_NAMES) if family.model_type == model_type), None)
    if found is None:
        known = {name for family in (*FAMILIES, *OTHER_NAMES) for name in (family.model_type, *family.wrapped_in)}
        raise FamilyError(f"{where}: {reason(keys, known)}")
    named = keys.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise FamilyError(f"{where}: architectures is {named!r}; use a list of names")
    bare = re.sub(r"For(CausalLM|ConditionalGeneration|PreTraining)$|LMHeadModel$", "Model", found.architecture)
    classes = (found.architecture, *found.other_architectures, bare)
    if named and not set(named) & set(classes):
        raise FamilyError(
            f"{where}: architecture {named[0]} is not supported; {found.name} is read as {' or '.join(classes)}"
        )
    return found


def text_part(keys: Mapping[str, Any], where: str) -> tuple[Family | None, dict[str, Any]]:
    """The family whose model a config.json holds beside other parts, and the keys of this model.

    None and the keys themselves for a file of one model.

    Raises:
        FamilyError: the file has no keys of the text model.
    """
    wrapped = [family for family in FAMILIES if keys.get("model_type") in family.wrapped_in]
    if not wrapped:
        return None, dict(keys)
    text = keys.get("text_config")
    if not isinstance(text, dict):
        raise FamilyError(f"{where}: has no text_config, which holds the keys of the text model")
    model_types = [family.model_type for family in wrapped]
    if text.get("model_type", model_types[0]) not in model_types:
        raise FamilyError(
            f"{where}: model_type of text_config is {text['model_type']!r}; a model of {keys['model_type']} is read "
            f"with {' or '.join(model_types)}"
        )
    found = wrapped[model_types.index(text.get("model_type", model_types[0]))]
    outer = {key: keys[key] for key in _OF_THE_WHOLE if key in keys}
    return found, {**outer, **text, "model_type": found.model_type, "architectures": [found.architecture]}


# Keys beside text_config that belong to the text model too.
_OF_THE_WHOLE = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "dtype", "torch_dtype"),
    "transformers_version",
)


def read_model(keys: Mapping[str, Any], where: str) -> tuple[Family, ModelConfig]:
    """Family and model section of a config.json.

    Raises:
        FamilyError: unknown family, or a key whose meaning is unknown.
    """
    _, keys = text_part(keys, where)
    family = family_of_config(keys, where)
    return family, _read(family, keys, where)


def _read(family: Family, keys: Mapping[str, Any], where: str) -> ModelConfig:
    hub = HubConfig(keys, where, family.absent, family.without_effect, family.aliases)
    values = family.read_config(hub)
    hub.finish()
    try:
        return ModelConfig(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = hub.names_of(first["input"]) or f"model.{'.'.join(map(str, first['loc']))}"
        message = first["msg"][:1].lower() + first["msg"][1:]
        raise FamilyError(f"{where}: {name} is {first['input']!r}, which is not valid: {message}") from None


def published_model(
    keys: Mapping[str, Any], where: str, names: Callable[[], Collection[str]]
) -> tuple[Family, dict[str, Any], ModelConfig]:
    """Family, corrected config.json and model section of a published model.

    Prediction layers (multi-token prediction) of which the files have no tensor are not part of the model, although
    the keys may count them: transformers saves such folders.

    Args:
        keys: content of config.json, or its equivalent.
        where: name of its place, for messages.
        names: gives the names of the stored tensors, for a family that needs them; none if they are not known.

    Raises:
        FamilyError: unknown family, or a key whose meaning is unknown.
    """
    family = family_of_config(keys, where)
    if family.correct_config is not None and (stored := names()):
        keys = family.correct_config(keys, stored)
    family, model = read_model(keys, where)
    if model.mtp_num_layers and not prediction_tensors(model, names()):
        model = model.model_copy(update={"mtp_num_layers": 0})
    return family, dict(keys), model


def prediction_tensors(model: ModelConfig, names: Iterable[str]) -> set[str]:
    """The names of tensors of prediction layers, which follow the others."""
    layers = range(model.num_layers, model.num_layers + model.mtp_num_layers)
    found = ((name, re.search(r"(?:^|\.)layers\.(\d+)\.", name)) for name in names)
    return {name for name, match in found if match is not None and int(match[1]) in layers}


def family_of_model(model: ModelConfig) -> Family:
    """The family whose config.json describes ``model`` exactly.

    Raises:
        FamilyError: no family does.
    """
    for family in FAMILIES:
        if describes(family, model):
            return family
    raise FamilyError(
        f"no published family has this model section, so that no program could read an export; {_nearest_words(model)}"
    )


_MOST_SHOWN = 8


def _nearest_words(model: ModelConfig) -> str:
    nearest = nearest_family(model)
    if nearest is None:
        return "the families are " + ", ".join(family.name for family in FAMILIES)
    family, different = nearest
    keys = ", ".join(f"model.{key} {theirs} (here {ours})" for key, theirs, ours in different[:_MOST_SHOWN])
    more = f" and {len(different) - _MOST_SHOWN} further keys" if len(different) > _MOST_SHOWN else ""
    return f"the nearest is {family.name}, with {keys}{more}"


def nearest_family(model: ModelConfig) -> tuple[Family, list[Difference]] | None:
    """The family whose config.json differs from ``model`` in the fewest keys, and these keys.

    A family of the same architecture, if there is one, is nearer than all others.
    None if one describes the model exactly, or if none can be written for it.
    """
    versions = ((family, _as_family(family, model)) for family in FAMILIES)
    found = [(family, differences(version, model)) for family, version in versions if version is not None]

    def farness(one: tuple[Family, list[Difference]]) -> tuple[bool, int]:
        return "architecture" in {key for key, _, _ in one[1]}, len(one[1])

    family, different = min(found, key=farness, default=(None, []))
    return (family, different) if family is not None and different else None


def describes(family: Family, model: ModelConfig) -> bool:
    """True if the family's config.json of ``model`` reads back as the same model."""
    found = _as_family(family, model)
    return found is not None and not differences(found, model)


def _as_family(family: Family, model: ModelConfig) -> ModelConfig | None:
    """The family's config.json of ``model``, read back; None if the family has no words for the model."""
    positions = model.max_position_embeddings or 1
    try:
        keys = family.write_config(model, model.vocab_size or 1, positions)
        return _read(family, keys, "config.json")
    except (FamilyError, ValueError):
        return None


Difference = tuple[str, Any, Any]
"""A key of the model section, and its value in each of two models."""


def first_difference(one: ModelConfig, other: ModelConfig) -> Difference | None:
    """The first key by which the two model sections are not the same model, and both values; None if they are.

    Keys that change no weight and no logit, such as dropout, may differ.
    """
    return next(iter(differences(one, other)), None)


def differences(one: ModelConfig, other: ModelConfig) -> list[Difference]:
    """All keys by which the two model sections are not the same model, with both values."""
    ours, theirs = _essence(one), _essence(other)
    return [(key, ours[key], theirs[key]) for key in ours if ours[key] != theirs[key]]


# Keys that further training may change, as for longer contexts.
TUNABLE = frozenset(
    [
        "rotary_base",
        "rotary_base_local",
        "rope_scaling",
        "norm_epsilon",
        "latent_norm_epsilon",
        "moe_expert_capacity_factor",
        "moe_token_drop_policy",
    ]
)

# Keys that change no weight and no logit.
_TRAINING_ONLY = frozenset(
    [
        "attention_backend",
        "attention_dropout",
        "hidden_dropout",
        "stack_output_dropout",
        "init_method_std",
        "init_method",
        "embedding_init_method_std",
        "mup_base_hidden_size",
        "make_vocab_size_divisible_by",
        "vocab_size",
        "max_position_embeddings",
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "z_loss_coeff",
        "moe_expert_capacity_factor",
        "moe_token_drop_policy",
        "moe_router_bias_update_rate",
        "mtp_loss_scaling_factor",
    ]
)


def _essence(model: ModelConfig) -> dict[str, Any]:
    keys = model.model_dump(exclude=set(_TRAINING_ONLY))
    layers = range(model.num_layers)
    resolved = {
        "ffn_hidden_size": model.ffn_size,
        "num_tokentypes": model.token_types,
        "kv_channels": model.head_dim,
        "num_query_groups": model.query_groups,
        "group_query_attention": False,
        "activation_func": model.activation,
        "swiglu": False,
        "openai_gelu": False,
        "squared_relu": False,
        "gated_linear_unit": model.is_gated,
        "add_qkv_bias": model.has_qkv_bias,
        "add_attention_output_bias": model.has_attention_output_bias,
        "moe_ffn_hidden_size": model.expert_ffn_size if model.num_experts else None,
        "moe_layer_freq": [model.is_moe_layer(layer) for layer in layers],
        "moe_router_score_function": model.router_score_function,
        "moe_router_pre_softmax": model.router_pre_softmax,
        "decoder_num_layers": model.num_decoder_layers,
        "scale_decoder_output": model.scales_decoder_output,
        "softmax_scale": model.softmax_scale if model.multi_latent_attention else score_scale(model),
        "logits_scaling": logits_divisor(model),
        "latent_norm_epsilon": (model.latent_norm_epsilon or model.norm_epsilon)
        if model.multi_latent_attention
        else None,
        "window_layers": [model.window_of(layer) for layer in layers],
        "no_rope_freq": [model.has_rope(layer) for layer in layers],
    }
    return {**keys, **resolved}

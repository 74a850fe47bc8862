"""Keys of config.json: absent ones mean what transformers means, and none is dropped or guessed."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from trainer.families.catalogue import FAMILIES, OTHER_NAMES, describes, family_of_model, read_model
from trainer.families.deepseek import DEEPSEEK_V3
from trainer.families.dense.gemma import GEMMA
from trainer.families.dense.granite import DENSE_GRANITE4, GRANITE
from trainer.families.dense.ministral import MINISTRAL, MINISTRAL3
from trainer.families.dense.olmo3 import OLMO3
from trainer.families.dense.phi3 import PHI3
from trainer.families.dense.smollm3 import SMOLLM3
from trainer.families.format.errors import FamilyError
from trainer.families.format.family import Family
from trainer.families.gemma2 import GEMMA2
from trainer.families.gemma3 import GEMMA3
from trainer.families.gpt2 import GPT2
from trainer.families.gpt_neox import GPT_NEOX
from trainer.families.gpt_oss import GPT_OSS
from trainer.families.llama import LLAMA
from trainer.families.mistral import MISTRAL
from trainer.families.mixtures.olmoe import OLMOE
from trainer.families.mixtures.qwen2_moe import QWEN2_MOE
from trainer.families.phi import PHI
from trainer.families.qwen2 import QWEN2
from trainer.families.qwen3 import QWEN3
from trainer.families.qwen3_moe import QWEN3_MOE
from trainer.families.t5 import T5

transformers = pytest.importorskip("transformers")


def _name(family: Family) -> str:
    return family.name


# All but kimi_k2, which no class of transformers has.
OF_TRANSFORMERS = [family for family in (*FAMILIES, *OTHER_NAMES) if family.model_type != "kimi_k2"]

# Old names, which the classes of transformers take but do not list; and T5's, which the class derives.
UNLISTED = {"rope_theta", "rope_local_base_freq", "rotary_emb_base", "rotary_pct", "partial_rotary_factor"} | {
    *("sliding_window_pattern", "n_positions", "scale_decoder_outputs", "tie_word_embeddings")
}


_SIZES = (
    r"^((vocab|hidden|intermediate)_size|num_(hidden_)?layers|num_(attention_)?heads|n_(embd|layer|head))$|^d_|^ffn_"
)


def model_of(family: Family, **changes: Any) -> dict[str, Any]:
    """The model section of the family's tiny file with these changes."""
    keys = {"model_type": family.model_type, **family.tiny, **changes}
    return read_model({key: value for key, value in keys.items() if value is not ...}, "config.json")[1].model_dump()


def sizes_of(family: Family) -> dict[str, Any]:
    """The sizes of the tiny file; DeepSeek-V3's class has 128 heads for keys and values."""
    needed = {key for key in family.tiny if re.search(_SIZES, key)}
    needed |= {"deepseek_v2": {"num_experts_per_tok"}, "deepseek_v3": {"num_key_value_heads"}}.get(
        family.model_type, set()
    )
    return {key: value for key, value in family.tiny.items() if key in needed and "rope" not in key}


@pytest.mark.parametrize("family", [family for family in OF_TRANSFORMERS if family is not DENSE_GRANITE4], ids=_name)
def test_an_absent_key_means_what_the_class_of_transformers_means(family: Family) -> None:
    config = transformers.AutoConfig.for_model(family.model_type, **sizes_of(family))
    fewest = read_model({"model_type": family.model_type, **sizes_of(family)}, "config.json")[1]
    for keys in (config.to_dict(), config.to_diff_dict()):
        keys["architectures"] = [family.architecture]
        assert read_model(keys, "config.json")[1] == fewest
    whole = transformers.AutoConfig.for_model(family.model_type).to_dict()
    if family.model_type == "deepseek_v2":  # its class has no number
        whole["num_experts_per_tok"] = 6
    kept = {key: whole[key] for key in ("model_type", "num_experts_per_tok") if key in whole}
    assert read_model(kept, "config.json")[1] == read_model(whole, "config.json")[1]


@pytest.mark.parametrize("family", OF_TRANSFORMERS, ids=_name)
def test_the_table_of_absent_keys_is_that_of_the_class(family: Family) -> None:
    kind = type(transformers.AutoConfig.for_model(family.model_type))
    other = {key: alias for alias, key in kind.attribute_map.items()}
    listed = {field.name: field.default for field in dataclasses.fields(kind)}
    # Gemma 3 reads a flag that other classes know too.
    found = {key: listed.get(key, listed.get(other.get(key, ""), ...)) for key in family.absent if key not in UNLISTED}
    assert {key: value for key, value in found.items() if value != family.absent[key] and key in listed} == {}
    assert kind.attribute_map.items() <= family.aliases.items()


@pytest.mark.parametrize("family", OF_TRANSFORMERS, ids=_name)
@pytest.mark.parametrize("value", [False, None, [], {}, 0, ""], ids=repr)
def test_an_unknown_key_is_refused_whatever_its_value(family: Family, value: Any) -> None:
    with pytest.raises(FamilyError, match=r"config.json: the meaning of sparsity_multiplier is unknown"):
        model_of(family, sparsity_multiplier=value)


QWEN_LAYERS = {"num_hidden_layers": 30, "use_sliding_window": True, "sliding_window": 6}
LAYER_TYPES = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
# Cases that transformers reads too: our windows must be its own.
WINDOWS = {
    "Qwen2 without max_window_layers": (QWEN2, {**QWEN_LAYERS, "max_window_layers": ...}),
    "Qwen3 without max_window_layers": (QWEN3, QWEN_LAYERS),
    "Qwen3 with few": (QWEN3, {**QWEN_LAYERS, "max_window_layers": 0}),
    "Qwen3 switched off": (QWEN3, {**QWEN_LAYERS, "use_sliding_window": False}),
    "Qwen3 with a list": (QWEN3, {"use_sliding_window": True, "sliding_window": 6, "layer_types": LAYER_TYPES}),
    "Qwen3 without a width": (QWEN3, {"use_sliding_window": True, "max_window_layers": 0}),
    "Gemma 2 with a list": (GEMMA2, {"layer_types": LAYER_TYPES}),
    "Gemma 3 with an old pattern": (GEMMA3, {"layer_types": ..., "sliding_window_pattern": 2}),
    "Gemma 3 without any": (GEMMA3, {"layer_types": ..., "num_hidden_layers": 7}),
    "SmolLM3 in layers without rotation": (SMOLLM3, {"use_sliding_window": True, "sliding_window": 6}),
    "Qwen2-MoE without a list": (QWEN2_MOE, {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 3}),
    "SmolLM3 switched off": (SMOLLM3, {"sliding_window": 6}),
    "OLMo 3 without any": (OLMO3, {"num_hidden_layers": 9}),
    "OLMo 3 with a list": (OLMO3, {"layer_types": LAYER_TYPES}),
    "Ministral without any": (MINISTRAL, {"layer_types": ...}),
    "Ministral without a width": (MINISTRAL, {"layer_types": ..., "sliding_window": None}),
    "gpt-oss without any": (GPT_OSS, {"sliding_window": ...}),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_those_of_transformers(name: str) -> None:
    family, changes = WINDOWS[name]
    keys = {key: value for key, value in {**family.tiny, **changes}.items() if value is not ...}
    theirs = transformers.AutoConfig.for_model(family.model_type, **keys)
    model = read_model({"model_type": family.model_type, **keys}, "config.json")[1]
    expected = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert [model.window_of(layer) for layer in range(model.num_layers)] == expected


def test_every_layer_of_qwen3_moe_has_the_window_as_in_transformers() -> None:
    assert model_of(QWEN3_MOE, use_sliding_window=True, sliding_window=6, max_window_layers=3)["window_size"] == 6
    assert model_of(QWEN3_MOE, use_sliding_window=False, sliding_window=6)["window_size"] is None


def test_an_absent_key_and_a_null_one_may_differ() -> None:
    assert model_of(MISTRAL, num_key_value_heads=...)["num_query_groups"] == 8
    assert model_of(MISTRAL, num_attention_heads=4, num_key_value_heads=None)["num_query_groups"] == 4
    assert model_of(MISTRAL, sliding_window=...)["window_size"] == 4096
    assert model_of(MISTRAL, sliding_window=None)["window_size"] is None
    assert model_of(LLAMA, attention_bias=None)["add_qkv_bias"] is False


def test_keys_of_published_files_that_change_no_logit_are_read() -> None:
    """Of GPT-2 medium, Phi-4-mini, StarCoder2 of 7B, old files of BERT, and any quantized file."""
    quantized = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert model_of(GPT2, n_special=0, predict_special_tokens=True, xla_device=True) == model_of(GPT2)
    assert model_of(LLAMA, eos_token_ids=[2], **quantized) == model_of(LLAMA)
    assert model_of(PHI3, full_attn_mod=1, interpolate_factor=1, lm_head_bias=False) == model_of(PHI3)
    with pytest.raises(FamilyError, match="lm_head_bias is True, but this trainer computes only False"):
        model_of(PHI3, lm_head_bias=True)


def test_norms_of_latents_keep_their_epsilon() -> None:
    """As in Moonlight: transformers gives it to no other norm than those of whole vectors."""
    found = model_of(DEEPSEEK_V3, rms_norm_eps=1e-5)
    assert (found["norm_epsilon"], found["latent_norm_epsilon"]) == (1e-5, 1e-6)
    assert model_of(DEEPSEEK_V3, rms_norm_eps=1e-6)["latent_norm_epsilon"] is None


def test_other_names_of_a_key_are_read() -> None:
    assert model_of(GPT2, n_layer=..., num_hidden_layers=3)["num_layers"] == 3
    assert model_of(QWEN3_MOE, num_experts=8)["num_experts"] == 8
    assert model_of(DEEPSEEK_V3, num_mtp_layers=2, num_nextn_predict_layers=...)["mtp_num_layers"] == 2
    with pytest.raises(FamilyError, match=r"n_layer is 4, but num_hidden_layers, its other name, is 3"):
        model_of(GPT2, num_hidden_layers=3)


def test_a_length_that_the_scaling_lacks_is_that_of_the_model() -> None:
    """As in transformers, where the scaling is of a type with an old length."""
    scaling = {"type": "yarn", "factor": 4.0}
    found = model_of(LLAMA, rope_parameters=..., rope_scaling=scaling)["rope_scaling"]
    assert found == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


PARTIAL = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
REFUSED: dict[str, tuple[Family, dict[str, Any], str]] = {
    "rotation of a part in Llama": (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, but"),
    "the same in a table": (LLAMA, {"rope_parameters": PARTIAL}, "partial_rotary_factor is 0.5, which transformers"),
    "the same in Qwen3": (QWEN3, {"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25, but"),
    "an unknown kind of layer": (
        GEMMA2,
        {"layer_types": ["chunked_attention"] * 4},
        "layer_types has 'chunked_attention', but this trainer computes only sliding_attention or full_attention",
    ),
    "too few kinds": (QWEN3, {"layer_types": LAYER_TYPES[:3]}, "layer_types has 3 entries, but num_hidden_layers is 4"),
    "too many kinds": (GPT_OSS, {"layer_types": LAYER_TYPES * 2}, "layer_types has 8 entries"),
    "windows that are switched off": (QWEN3, {"layer_types": LAYER_TYPES}, "sliding_window names no window"),
    "two bases": (LLAMA, {"rope_theta": 1e6}, "rope_theta is 1000000.0, but rope_theta of the rotary positions is 500"),
    "two scalings": (
        LLAMA,
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "rope_scaling and rope_parameters contradict each other",
    ),
    "scaling per layer": (
        LLAMA,
        {"rope_parameters": {"full_attention": PARTIAL, "sliding_attention": PARTIAL}},
        "rope_parameters differs by kind of layer",
    ),
    "one table for two bases": (GEMMA3, {"rope_parameters": {"rope_theta": 1e4}}, "does not name full_attention"),
    "a name of GPT-NeoX that nobody reads": (GPT_NEOX, {"rope_theta": 2e4}, "rope_theta is 20000.0, but"),
    "layers of other sizes": (LLAMA, {"per_layer_config": {"1": {"intermediate_size": 8}}}, "per_layer_config is"),
    "heads that were removed": (GPT2, {"pruned_heads": {"0": [1]}}, "pruned_heads is {'0': [1]}, but"),
    "attention to another model": (GPT2, {"add_cross_attention": True}, "add_cross_attention is True, but"),
    "two decoders": (T5, {"is_encoder_decoder": False}, "is_encoder_decoder is False, but"),
    "clipped queries": (OLMOE, {"clip_qkv": 8.0}, "clip_qkv is 8.0, but this trainer computes only None"),
    "a base that two versions read differently": (
        OLMO3,
        {"rope_parameters": ..., "rope_theta": 1e4},
        "rope_theta is 10000.0, which transformers 5 gives only the layers without a window",
    ),
    "scaled queries in Llama": (
        LLAMA,
        {"rope_parameters": MINISTRAL3.tiny["rope_parameters"]},
        "llama_4_scaling_beta is 0.3, which transformers does not compute in this family",
    ),
    "Ministral 3 without scaled queries": (
        MINISTRAL3,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        "rope_type linear has no llama_4_scaling_beta",
    ),
    "another scaling in Phi-3": (
        PHI3,
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_type is 'linear', but transformers computes only 'longrope' in this family",
    ),
    "two old lengths": (
        PHI3,
        {"rope_scaling": {**PHI3.tiny["rope_scaling"], "original_max_position_embeddings": 16}},
        "original_max_position_embeddings of the rotary positions is 16, but original_max_position_embeddings 64",
    ),
    "too few layers that rotate": (
        SMOLLM3,
        {"no_rope_layers": [1, 0]},
        "no_rope_layers is [1, 0]; use a list with 1 for",
    ),
    "windows of SmolLM3 that are switched off": (
        SMOLLM3,
        {"layer_types": LAYER_TYPES},
        "layer_types has sliding_attention, but use_sliding_window is false",
    ),
    "gates of transformers 4": (GEMMA, {"hidden_activation": "silu"}, "hidden_activation is 'silu', but"),
    "absent heads of the published size": (
        DEEPSEEK_V3,
        {"num_key_value_heads": ...},
        "num_key_value_heads is absent, which means 128, but this trainer computes only 8",
    ),
    "null for a number": (LLAMA, {"rms_norm_eps": None}, "rms_norm_eps is null; it needs a number"),
    "several at once": (
        LLAMA,
        {"mlp_bias": True, "hidden_act": "relu", "router_scale": 2.0},
        "config.json: hidden_act is 'relu', but this trainer computes only 'silu' or 'swish'; mlp_bias is True, but "
        "this trainer computes only False; the meaning of router_scale is unknown",
    ),
    "a scaling without its type": (
        LLAMA,
        {"rope_parameters": ..., "rope_scaling": {"factor": 2.0}},
        "rope_scaling has factor, but no rope_type",
    ),
    "layers that are not there": (QWEN3_MOE, {"mlp_only_layers": [1, 9]}, "mlp_only_layers is [1, 9]; use numbers of"),
    "a huge number of experts": (QWEN3_MOE, {"num_experts": 10**9}, "use a whole number above 0 up to 100000"),
    "text for a number": (LLAMA, {"num_hidden_layers": "five"}, "num_hidden_layers is 'five'; use a whole number"),
    "a negative number": (LLAMA, {"num_hidden_layers": -1}, "num_hidden_layers is -1; use a whole number from 1 to"),
    "a huge number": (LLAMA, {"num_hidden_layers": 1_000_000_000}, "use a whole number from 1 to 10000"),
    "half a channel": (LLAMA, {"hidden_size": 90.5}, "hidden_size is 90.5; use a whole number"),
    "a flag for a number": (GPT2, {"n_head": True}, "n_head is True; use a whole number"),
    "no key heads": (LLAMA, {"num_key_value_heads": 0}, "num_key_value_heads is 0; use a whole number above 0"),
    "text for a flag": (LLAMA, {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; use true or false"),
    "text for a rate": (PHI, {"resid_pdrop": "0.1"}, "resid_pdrop is '0.1'; use a number"),
    "a rate above 1": (LLAMA, {"attention_dropout": 1.5}, "attention_dropout is 1.5, which is not valid"),
    "a window of no tokens": (MISTRAL, {"sliding_window": 0}, "sliding_window is 0; use a whole number above 0"),
    "a scale of 0": (GEMMA2, {"query_pre_attn_scalar": 0}, "is not valid: input should be greater than 0"),
    "text for a table": (LLAMA, {"rope_scaling": "linear"}, "rope_scaling is 'linear'; use a table"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_is_refused_in_one_sentence(name: str) -> None:
    family, changes, message = REFUSED[name]
    with pytest.raises(FamilyError) as caught:
        model_of(family, **changes)
    assert message in str(caught.value)
    assert str(caught.value).startswith("config.json: ") and "\n" not in str(caught.value)


GRANITE4: dict[str, tuple[dict[str, Any], str]] = {
    "a layer of state space": ({"layer_types": ["mamba"] * 3 + ["attention"]}, "has state-space layers"),
    "experts": ({"num_local_experts": 8}, "num_local_experts is 8, but this trainer computes only 0"),
    "no rotation": ({"position_embedding_type": ...}, "position_embedding_type is not 'rope'"),
    "too few kinds": ({"layer_types": ["attention"] * 3}, "layer_types has 3 entries, but num_hidden_layers is 4"),
}


@pytest.mark.parametrize("name", GRANITE4)
def test_only_a_dense_granite_4_is_read(name: str) -> None:
    changes, message = GRANITE4[name]
    assert model_of(DENSE_GRANITE4)["logits_scaling"] == 2.5
    with pytest.raises(FamilyError, match=re.escape(message)):
        model_of(DENSE_GRANITE4, **changes)


def test_a_model_with_a_base_width_is_a_granite_and_no_llama() -> None:
    model = read_model({"model_type": "llama", **LLAMA.tiny}, "config.json")[1]
    scaled = model.model_copy(update={"mup_base_hidden_size": model.hidden_size // 4, "embedding_scale": 3.0})
    assert family_of_model(model) is LLAMA and family_of_model(scaled) is GRANITE
    written = GRANITE.write_config(scaled, 101, 64)
    assert (written["attention_multiplier"], written["logits_scaling"]) == (1 / model.head_dim, 4)
    assert written["embedding_multiplier"] == 3
    # Scores that are those of Llama: no other family is needed for a base as wide as the model.
    same = {"mup_base_hidden_size": model.hidden_size, "softmax_scale": model.head_dim**-0.5}
    assert family_of_model(model.model_copy(update=same)) is LLAMA


def test_bases_of_two_kinds_of_layers_survive() -> None:
    tables = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    model = read_model({"model_type": "olmo3", **OLMO3.tiny, "rope_parameters": tables}, "config.json")[1]
    assert (model.rotary_base, model.rotary_base_local) == (1e6, 1e4)
    written = OLMO3.write_config(model, 101, 64)
    assert written["rope_parameters"] == tables and "rope_theta" not in written
    assert read_model({"model_type": "olmo3", **written}, "config.json")[1] == model


def test_longrope_means_what_transformers_means() -> None:
    factors = PHI3.tiny["rope_scaling"]
    for name in ("longrope", "su", "yarn"):
        found = model_of(PHI3, rope_scaling={**factors, "type": name}, original_max_position_embeddings=...)
        assert found["rope_scaling"]["rope_type"] == "longrope"
        assert found["rope_scaling"]["original_max_position_embeddings"] == 4096
    assert model_of(PHI3)["rope_scaling"]["factor"] == 2.0
    longer = model_of(PHI3, rope_scaling={**factors, "attention_factor": 1.5, "factor": 3.0})["rope_scaling"]
    assert (longer["attention_factor"], longer["factor"]) == (1.5, 3.0)
    llama = {"rope_type": "longrope", **{key: factors[key] for key in ("short_factor", "long_factor")}}
    scaling = {**llama, "original_max_position_embeddings": 16}
    assert model_of(LLAMA, rope_parameters=..., rope_scaling=scaling)["rope_scaling"] == {**scaling, "factor": 4.0}


def test_layers_without_rotation_are_those_of_transformers() -> None:
    for keys in ({}, {"no_rope_layers": None}, {"no_rope_layers": None, "no_rope_layer_interval": 3}):
        whole = {**SMOLLM3.tiny, "num_hidden_layers": 4, **keys}
        theirs = transformers.AutoConfig.for_model("smollm3", **whole).no_rope_layers
        model = read_model({"model_type": "smollm3", **whole}, "config.json")[1]
        assert [model.has_rope(layer) for layer in range(4)] == [bool(entry) for entry in theirs]
        by_number = model.model_copy(update={"no_rope_freq": whole.get("no_rope_layer_interval", 4)})
        assert describes(SMOLLM3, by_number)

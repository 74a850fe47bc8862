"""Model types that are not read: the part that is not computed here, or what to do instead. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_IMAGES, _LINEAR = "a part for images or sound beside its text model", "layers of linear attention"
_STATES, _INDEXED = "state-space layers", "attention to the tokens that an indexer chooses"
_ALIBI = "biases of attention by distance (ALiBi) in layers other than BLOOM's"
_NOT_COMPUTED: Mapping[str, tuple[str, ...]] = {
    _LINEAR: (
        *("bailing_hybrid", "kimi_linear", "minimax", "minimax_m1", "minimax_text_01", "olmo_hybrid", "qwen3_next"),
        *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    ),
    _STATES: (
        *("bamba", "falcon_h1", "falcon_mamba", "hymba", "jamba", "mamba", "mamba2", "nemotron_h", "phi4flash"),
        *("plamo2", "zamba", "zamba2"),
    ),
    "recurrent layers": ("recurrent_gemma", "rwkv", "rwkv5", "rwkv6", "rwkv7", "rwkv6qwen2", "xlstm"),
    "convolutions in the place of attention": ("lfm2", "lfm2_moe"),
    _IMAGES: (
        *("aya_vision", "cohere2_vision", "deepseek_vl_v2", "exaone4_5", "gemma3n", "gemma4", "glm4v", "glm4v_moe"),
        *(
            "git",
            "granite_speech",
            "idefics",
            "idefics2",
            "idefics3",
            "internvl",
            "internvl_chat",
            "kimi_k25",
            "kimi_vl",
        ),
        *(
            "lfm2-vl",
            "lfm2_vl",
            "llama4",
            "llava",
            "llava_llama",
            "llava_mistral",
            "llava_next",
            "llava_onevision",
            "minicpmo",
        ),
        *("maira2", "minicpmv", "minimax_m3_vl", "mllama", "molmo", "moondream1", "ovis", "paligemma", "phi3_v"),
        *("phi4_multimodal", "phi4mm", "pixtral", "qwen2_5_omni", "qwen2_5_vl", "qwen2_audio", "qwen2_vl"),
        *("qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "step3p7", "ultravox", "voxtral", "whisper"),
    ),
    _INDEXED: ("deepseek_v32", "deepseek_v4", "glm_moe_dsa"),
    _ALIBI: ("jais", "mpt"),
    "layers of different shapes": ("deci", "nemotron-nas", "openelm"),
    "an activation with trained coefficients": ("apertus",),
    "the router SparseMixer": ("phimoe",),
    "norms over queries and keys after their rotation": ("hunyuan_v1_dense", "hunyuan_v1_moe"),
    "norms without weights": ("olmo",),
}

# Keys that show the part in a file of any other type.
_SIGNS: Mapping[str, tuple[str, ...]] = {
    _IMAGES: ("audio_config", "mm_vision_tower", "vision_config", "visual"),
    _LINEAR: ("linear_attn_config", "linear_num_key_heads"),
    _STATES: ("hybrid_override_pattern", "mamba_d_state", "ssm_cfg", "ssm_state_size"),
    _INDEXED: ("index_topk",),
    _ALIBI: ("alibi",),
}

_OTHER_FORM: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("mixformer-sequential", "phi-msft"),
        ("is Phi for Microsoft's first code", "take the present files of the same model, whose model_type is phi"),
    ),
    "internlm2": (
        "is InternLM2 with queries, keys and values in one tensor",
        "convert the files to Llama with InternLM's tools/convert2llama.py",
    ),
    "qwen": ("is the first Qwen for its own code", "take Qwen1.5 or later, whose model_type is qwen2 or qwen3"),
    "chatglm": ("is GLM for its own code", "take glm-4-9b-chat-hf or a later GLM-4, whose model_type is glm or glm4"),
}


def reason(keys: Mapping[str, Any], known: Collection[str]) -> str:
    """One sentence, without its place: the reason why a file of an unknown type is not read, and what to do.

    Args:
        keys: content of config.json.
        known: the model types that are read.
    """
    model_type = keys.get("model_type")
    others = f"one of the types that are read: {', '.join(sorted(known))}"
    if model_type is None:
        return f"has no model_type, which names the family; add it as transformers 5 writes it, {others}"
    if str(model_type) in _OTHER_FORM:
        what, remedy = _OTHER_FORM[str(model_type)]
        return f"model_type {model_type!r} {what}, which this trainer does not read; {remedy}"
    part = next((part for part, model_types in _NOT_COMPUTED.items() if model_type in model_types), None)
    part = part or next((part for part, signs in _SIGNS.items() if any(keys.get(sign) for sign in signs)), None)
    if part is not None:
        return f"model_type {model_type!r} has {part}, which this trainer does not compute; use a model of {others}"
    return f"model_type {model_type!r} is not a family known here; use a model of {others}"

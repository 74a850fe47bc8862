"""GGUF files of tiny models, written with the package gguf, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.families.published_models import published
from trainer.families.catalogue import FAMILIES

gguf = pytest.importorskip("gguf")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
"""Every matrix has rows of a multiple of 32 elements, the block of most types."""
_NORMAL, _CONTROL = 1, 3
FULL_ATTENTION = {"use_sliding_window": False, "layer_types": ["full_attention"] * 2}


def tiny_model(model_type: str, **changes: Any) -> Any:
    """A tiny model of transformers with random weights."""
    family = next(family for family in FAMILIES if family.model_type == model_type)
    return published(family, **{**SIZES, **({} if model_type == "llama" else FULL_ATTENTION), **changes})


def interleave_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of query or key in llama.cpp's order: the two channels that rope rotates together are neighbours."""
    order = np.arange(len(rows)).reshape(heads, 2, -1).transpose(0, 2, 1).ravel()
    return rows[order]


def keys_of(model: Any) -> dict[str, Any]:
    """Keys of the file, without the name of the architecture."""
    config = model.config
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "vocab_size": config.vocab_size,
    }


def byte_level_keys(tokenizer_json: Path) -> dict[str, Any]:
    """Keys of a byte-level vocabulary, with two further tokens, which begin and end a text."""
    model = json.loads(tokenizer_json.read_text())["model"]
    words = [*sorted(model["vocab"], key=model["vocab"].__getitem__), "<bos>", "<eos>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [_CONTROL if word.startswith("<") else _NORMAL for word in words],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": len(words) - 2,
        "tokenizer.ggml.eos_token_id": len(words) - 1,
    }


def write_gguf(
    path: Path,
    model: Any,
    kind: str = "F32",
    *,
    keys: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """Write a model of transformers.

    Args:
        path: of the file.
        model: the model.
        kind: type of the matrices.
        keys: instead of the model's.
        metadata: further keys, of the tokenizer for example.
        tensors: instead of the model's, or in addition; None leaves one out.
    """
    name = model.config.model_type
    writer = gguf.GGUFWriter(path, name)
    typed = {f"{name}.{key}": value for key, value in {**keys_of(model), **(keys or {})}.items()} | {**(metadata or {})}
    for key, value in typed.items():
        _add(writer, key, value)
    for key, values in _tensors_of(model, tensors or {}).items():
        if values.ndim > 1 and kind != "F32":
            wanted = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(key, gguf.quantize(values, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(key, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors_of(model: Any, changes: Mapping[str, np.ndarray | None]) -> dict[str, np.ndarray]:
    architecture = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == model.config.model_type)
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    found: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().float().numpy()
        for part, heads in (("q", model.config.num_attention_heads), ("k", model.config.num_key_value_heads)):
            if f"{part}_proj" in name and model.config.model_type == "llama":
                values = interleave_halves(values, heads)
        found[names.get_name(name, try_suffixes=(".weight", ".bias"))] = np.ascontiguousarray(values)
    return {name: values for name, values in {**found, **changes}.items() if values is not None}


def _add(writer: Any, key: str, value: Any) -> None:
    if key == "general.alignment":
        writer.add_custom_alignment(value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)

"""Keys of a GGUF file as those of config.json. Torch-free.

Names of keys: github.com/ggml-org/ggml/blob/master/docs/gguf.md; scaling of rope in Llama 3.1: the tensor rope_freqs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.families.format.errors import FamilyError
from trainer.families.gguf.header import GgufHeader, Read, float32_elements

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of divisors of rope's frequencies [head_dim / 2], which files of Llama 3.1 and later hold."""


@dataclass(frozen=True)
class Architecture:
    """An architecture that can be read.

    Attributes:
        name: ``general.architecture``.
        model_type: of config.json.
        permutes_heads: rows of query and key are stored in llama.cpp's order, pairs of rope side by side.
    """

    name: str
    model_type: str
    permutes_heads: bool = False


_ROWS = (
    Architecture("llama", "llama", permutes_heads=True),
    Architecture("qwen2", "qwen2"),
    Architecture("qwen3", "qwen3"),
)
_SHAPE = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
_READ = (
    *("vocab_size", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scaling.original_context_length", "rope.scaling.finetuned"),
)
_LENGTH = "original_max_position_embeddings"
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, _LENGTH: 8192}
"""Llama 3.1's scaling, the only one published; a GGUF file holds only its result (config.json of Llama-3.1-8B)."""


def architecture_of(metadata: Mapping[str, Any], where: str) -> Architecture:
    """The row of the file's architecture.

    Raises:
        FamilyError: it is not known here.
    """
    name = metadata.get("general.architecture")
    found = next((row for row in _ROWS if row.name == name), None)
    if found is None:
        raise FamilyError(
            f"{where}: general.architecture {name!r} is not read from GGUF; known are "
            f"{', '.join(row.name for row in _ROWS)}; import a Hugging Face folder of the model"
        )
    return found


def published_keys(header: GgufHeader, where: str, read: Read) -> dict[str, Any]:
    """Content of the config.json that describes the model of a file.

    Args:
        header: of the file.
        where: name of the file, for messages.
        read: of the file, for the table of rope's divisors.

    Raises:
        FamilyError: see config_keys; or the file is cut.
    """
    table = header.tensors.get(ROPE_FACTORS)
    factors = None if table is None else float32_elements(where, table, read)
    return config_keys(header.metadata, header.shapes, factors, where)


def config_keys(
    metadata: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], factors: Sequence[float] | None, where: str
) -> dict[str, Any]:
    """Content of the config.json that describes the same model.

    Args:
        metadata: keys and values of the file.
        shapes: of all tensors, by GGUF's names, the outer dim first.
        factors: content of the tensor ``rope_freqs.weight``, if there is one.
        where: name of the file, for messages.

    Raises:
        FamilyError: a key is missing, or has a meaning that is unknown or not supported.
    """
    row = architecture_of(metadata, where)
    prefix = f"{row.name}."
    keys = {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}
    unknown = sorted(name for name, value in keys.items() if name not in _SHAPE and name not in _READ and value)
    if unknown:
        raise FamilyError(
            f"{where}: the meaning of {prefix}{unknown[0]} is unknown here, and leaving it out could change the model; "
            "import a Hugging Face folder of the model"
        )
    missing = next((name for name in _SHAPE if name not in keys), None)
    if missing is not None or "token_embd.weight" not in shapes:
        raise FamilyError(f"{where}: has no {f'key {prefix}{missing}' if missing else 'tensor token_embd.weight'}")
    found = {ours: keys[name] for name, ours in _SHAPE.items()}
    listed = next((name for name in _SHAPE if isinstance(keys[name], list)), None)
    if listed is not None:
        raise FamilyError(f"{where}: {prefix}{listed} differs by layer, which is not supported")
    found |= {
        "model_type": row.model_type,
        "num_key_value_heads": keys.get("attention.head_count_kv", keys["attention.head_count"]),
        "head_dim": _head_dim(keys, where),
        "vocab_size": shapes["token_embd.weight"][0],
        # llama.cpp writes no output table if it is the word table.
        "tie_word_embeddings": "output.weight" not in shapes,
        "rope_theta": keys.get("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(keys, factors, where),
    }
    # No key tells of biases; in Qwen2 they are always there.
    if "blk.0.attn_q.bias" in shapes and row.model_type != "qwen2":
        found["attention_bias"] = True
    tokens = {ours: metadata.get(f"tokenizer.ggml.{name}_token_id") for name, ours in _TOKENS.items()}
    return found | {name: token for name, token in tokens.items() if token is not None}


def _head_dim(keys: Mapping[str, Any], where: str) -> int:
    usual = keys["embedding_length"] // keys["attention.head_count"]
    width = int(keys.get("attention.key_length", usual))
    for name in ("attention.value_length", "rope.dimension_count"):
        if keys.get(name, width) != width:
            raise FamilyError(
                f"{where}: {name} is {keys[name]}, but heads have {width} channels; only equal ones are read"
            )
    return width


def _scaling(keys: Mapping[str, Any], factors: Sequence[float] | None, where: str) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise FamilyError(f"{where}: rope.scaling.type {kind!r} is unknown; known are none, linear and yarn")
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys["rope.scaling.factor"]}
    if kind == "yarn":
        length = keys["rope.scaling.original_context_length"]
        return {
            "rope_type": "yarn",
            "factor": keys["rope.scaling.factor"],
            _LENGTH: length,
        }
    return None if factors is None else _llama_3(keys, factors, where)


def _llama_3(keys: Mapping[str, Any], factors: Sequence[float], where: str) -> dict[str, Any]:
    """Scaling whose divisors are ``factors``: Llama 3.1's, if it gives the same numbers."""
    scaling = {"rope_type": "llama3", "factor": round(max(factors), 6), **_LLAMA_3}
    base = keys.get("rope.freq_base", 10000.0)
    expected = [_divisor(2 * math.pi * base ** (i / len(factors)), scaling) for i in range(len(factors))]
    if not all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(factors, expected, strict=True)):
        raise FamilyError(
            f"{where}: {ROPE_FACTORS} is not the scaling of Llama 3.1; import a Hugging Face folder of the model, "
            "whose config.json has the scaling"
        )
    return scaling


def _divisor(wavelength: float, scaling: Mapping[str, Any]) -> float:
    """Divisor of the frequency of this wavelength, in positions (transformers modeling_rope_utils.py, llama3)."""
    low, high, length = (scaling[name] for name in ("low_freq_factor", "high_freq_factor", _LENGTH))
    if wavelength < length / high:
        return 1.0
    if wavelength > length / low:
        return float(scaling["factor"])
    smooth = (length / wavelength - low) / (high - low)
    return float(1 / ((1 - smooth) / scaling["factor"] + smooth))

"""What the keys of the data section mean together: blends of datasets, splits, and what excludes what. Torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.config.errors import ConfigError

if TYPE_CHECKING:
    from trainer.config.sections import DataConfig

SPLIT_PATH_KEYS = ("train_data_path", "valid_data_path", "test_data_path")
PATH_KEYS = ("data_path", *SPLIT_PATH_KEYS)
STREAMING_KEYS = ("streaming_key", "streaming_text_document", "streaming_on_error", "streaming_buffer_mib")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf(inity)?)", re.IGNORECASE)


@dataclass(frozen=True)
class BlendPart:
    """One dataset of a blend."""

    prefix: str
    weight: float | None = None
    """Its share of the samples, in proportion to the others'; None: it counts by its size."""


def path_entries(value: Any) -> Any:
    """The entries of a data path, as text, from what YAML or a shell made of ``0.3 A 0.7 B``: one string or a list.

    A string with spaces is one prefix unless its words are pairs of a number and something else. What is no data path
    at all comes back as it is.
    """
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        return value
    if len(value) == 1 and isinstance(value[0], str):
        words = value[0].split()
        if len(words) > 1 and len(words) % 2 == 0 and all(map(_is_number, words[::2])):
            return words
    return [str(entry) if isinstance(entry, (int, float)) and not isinstance(entry, bool) else entry for entry in value]


def weight_places(entries: Sequence[str]) -> range:
    """Which of ``entries`` are weights: every other one, or none.

    Megatron-LM's rule (get_blend_from_list in megatron/core/datasets/utils.py).
    """
    is_paired = len(entries) % 2 == 0 and all(map(_is_number, entries[::2]))
    return range(0, len(entries), 2) if is_paired else range(0)


def parse_blend(key: str, entries: Sequence[str]) -> tuple[BlendPart, ...]:
    """The datasets of a data path, as in ``0.3 A 0.7 B`` or ``A B``; those of weight 0 too.

    Raises:
        ConfigError: weights and prefixes are mixed up, or the weights cannot be used.
    """
    places = weight_places(entries)
    if not places:
        # A weight before the first of several prefixes, which a shell or YAML has left in one piece.
        words = entries[0].split() if len(entries) == 1 else []
        joined = entries[0] if len(words) > 1 and _is_number(words[0]) else None
        stray = next((entry for entry in entries if _is_number(entry)), joined)
        if stray is not None:
            raise ConfigError(
                key,
                f"{' '.join(entries)!r} is neither prefixes alone nor pairs of a weight and a prefix, as in 0.3 A 0.7 "
                f"B; give every prefix a weight, or none (a file that is called {stray} is ./{stray})",
            )
        return tuple(BlendPart(entry) for entry in entries)
    parts = tuple(BlendPart(entries[place + 1], float(entries[place])) for place in places)
    for part in parts:
        assert part.weight is not None
        if not (0 <= part.weight < math.inf):
            raise ConfigError(
                key, f"the weight {part.weight:g} of {part.prefix} is not a number of 0 or more; use its share, as 0.3"
            )
    total = sum(part.weight or 0.0 for part in parts)
    if total == math.inf:
        raise ConfigError(key, "its weights add up to more than a float64 can hold; use shares, as in 0.3 A 0.7 B")
    if not total:
        raise ConfigError(key, "its weights add up to 0; give at least one prefix a share above 0")
    return parts


def _is_number(entry: str) -> bool:
    return _NUMBER.fullmatch(entry.strip()) is not None


def parse_split(split: str) -> tuple[float, float, float]:
    """Shares of the train, valid and test split, summing to 1, from Megatron's ``949,50,1``.

    Raises:
        ConfigError: anything but one to three non-negative numbers, separated by commas, with a sum above zero.
    """
    parts = [part.strip() for part in split.split(",")]
    weights = [float(part) if _NUMBER.fullmatch(part) else -1.0 for part in parts]
    weights += [0.0] * (3 - len(weights))
    # From left to right, as numpy does in Megatron-LM: Python's sum rounds otherwise since 3.12, and the last bit of a
    # share can decide on which side of a bound a document lies.
    total = 0.0
    for weight in weights:
        total += weight
    if len(weights) != 3 or not all(weight >= 0 for weight in weights) or not 0 < total < math.inf:
        raise ConfigError(
            "data.split", f"{split!r} is not one to three non-negative numbers separated by commas, as in 969,30,1"
        )
    return weights[0] / total, weights[1] / total, weights[2] / total


def check_data(data: DataConfig) -> None:
    """Refuse keys of the data section that contradict each other.

    Raises:
        ConfigError: names the key and what to do.
    """
    sources = [name for name in ("data_path", "train_data_path", "mock_data") if getattr(data, name)]
    if len(sources) > 1:
        raise ConfigError(f"data.{sources[1]}", f"excludes data.{sources[0]}; set only one of the two")
    for name in PATH_KEYS:
        parse_blend(f"data.{name}", getattr(data, name))
    for name in SPLIT_PATH_KEYS[1:]:
        if getattr(data, name) and not data.train_data_path:
            raise ConfigError(f"data.{name}", "goes with data.train_data_path, which is unset")
    train_share, _, _ = parse_split(data.split)
    if data.data_path and not train_share:
        raise ConfigError("data.split", f"{data.split!r} leaves nothing to train on; give the first share more than 0")
    _check_packing(data)
    _check_streaming(data)


def _check_streaming(data: DataConfig) -> None:
    if not data.streaming:
        fields = type(data).model_fields
        set_anyway = [key for key in STREAMING_KEYS if getattr(data, key) != fields[key].default]
        if set_anyway:
            raise ConfigError(f"data.{set_anyway[0]}", "goes with data.streaming, which is unset; set it")
        return
    if data.mock_data:
        raise ConfigError("data.streaming", "excludes data.mock_data; set only one of the two")
    if data.sample_packing:
        raise ConfigError("data.sample_packing", "needs documents whose lengths are known; prepare the text first")
    if data.sample_order == "megatron":
        raise ConfigError("data.sample_order", "megatron is an order of prepared data; use stable with data.streaming")
    if not (data.tokenizer_model or data.vocab_file or data.tokenizer_type == "NullTokenizer"):
        raise ConfigError("data.tokenizer_model", "is unset, and data.streaming needs it; name the tokenizer's files")
    for name in PATH_KEYS:
        if weight_places(getattr(data, name)):
            raise ConfigError(f"data.{name}", "takes no weights with data.streaming: all text is one; prepare a blend")


def _check_packing(data: DataConfig) -> None:
    if data.answer_only_loss and not data.sample_packing:
        raise ConfigError("data.answer_only_loss", "goes with data.sample_packing, which keeps documents whole; set it")
    if not data.sample_packing:
        return
    if data.mock_data:
        raise ConfigError("data.sample_packing", "has nothing to pack in mock data; name data in data.data_path")
    if data.sample_order == "megatron":
        raise ConfigError(
            "data.sample_order", "megatron is an order of samples that cut documents; use stable with sample_packing"
        )

"""Blends and splits of datasets. Torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.errors import ConfigError

SPLIT_PATH_KEYS = ("train_data_path", "valid_data_path", "test_data_path")
PATH_KEYS = ("data_path", *SPLIT_PATH_KEYS)
DEFAULT_SPLIT = "969,30,1"
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf(inity)?)", re.IGNORECASE)


@dataclass(frozen=True)
class BlendPart:
    """One dataset of a blend."""

    prefix: str
    weight: float | None = None
    """Share of the samples relative to the other datasets' weights. None: in proportion to the dataset's size."""


def path_entries(value: Any) -> Any:
    """Entries of a data path as strings, such as ``0.3 A 0.7 B``.

    ``value`` is a string or a list. A string with spaces is one prefix unless its words are pairs of a number and a
    prefix. A value of any other type is returned unchanged.
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
    """Indices of the weights in ``entries``: every second entry, or empty.

    Megatron-LM's rule (get_blend_from_list in megatron/core/datasets/utils.py).
    """
    is_paired = len(entries) % 2 == 0 and all(map(_is_number, entries[::2]))
    return range(0, len(entries), 2) if is_paired else range(0)


def parse_blend(key: str, entries: Sequence[str]) -> tuple[BlendPart, ...]:
    """Datasets of a data path, without those of weight 0.

    Raises:
        ConfigError: only some prefixes have a weight, or a weight is negative, NaN or infinite, or all are 0.
    """
    places = weight_places(entries)
    if not places:
        # Only the first of several prefixes has a weight, and a shell or YAML passed all of them as one string.
        words = entries[0].split() if len(entries) == 1 else []
        joined = entries[0] if len(words) > 1 and _is_number(words[0]) else None
        stray = next((entry for entry in entries if _is_number(entry)), joined)
        if stray is not None:
            raise ConfigError(
                key,
                f"{' '.join(entries)!r} is neither prefixes alone nor pairs of a weight and a prefix, as in 0.3 A 0.7 "
                f"B; give a weight to every prefix or to none (for a file named {stray} write ./{stray})",
            )
        return tuple(BlendPart(entry) for entry in entries)
    parts = tuple(BlendPart(entries[place + 1], float(entries[place])) for place in places)
    for part in parts:
        assert part.weight is not None
        if not (0 <= part.weight < math.inf):
            raise ConfigError(
                key, f"the weight {part.weight:g} of {part.prefix} is not a number >= 0; use a share such as 0.3"
            )
    total = sum(part.weight or 0.0 for part in parts)
    if total == math.inf:
        raise ConfigError(key, "the sum of the weights overflows float64; use shares, as in 0.3 A 0.7 B")
    if not total:
        raise ConfigError(key, "all weights are 0; give at least one prefix a weight above 0")
    return tuple(part for part in parts if part.weight)


def _is_number(entry: str) -> bool:
    return _NUMBER.fullmatch(entry.strip()) is not None


def parse_split(split: str) -> tuple[float, float, float]:
    """Shares of train, valid and test, normalised to sum 1, from ``949,50,1``.

    Raises:
        ConfigError: ``split`` is not one to three non-negative numbers, separated by commas, with a sum above zero.
    """
    # Megatron-LM too leaves out quotes that a script passes on.
    parts = [part.strip(" '\"") for part in split.split(",")]
    weights = [float(part) if _NUMBER.fullmatch(part) else -1.0 for part in parts]
    weights += [0.0] * (3 - len(weights))
    # Add from left to right, as numpy does in Megatron-LM. Python's sum rounds differently since 3.12, and the last
    # bit of a share can decide to which split a document belongs.
    total = 0.0
    for weight in weights:
        total += weight
    if len(weights) != 3 or not all(weight >= 0 for weight in weights) or not 0 < total < math.inf:
        raise ConfigError(
            "data.split", f"{split!r} is not one to three non-negative numbers separated by commas, as in 969,30,1"
        )
    return weights[0] / total, weights[1] / total, weights[2] / total


def split_bounds(count: int, shares: Sequence[float]) -> list[int]:
    """Bounds of contiguous splits of ``count`` sequences: ``int(round(cumulative share x count))``, the first 0.

    Megatron-LM's rule (megatron/core/datasets/blended_megatron_dataset_builder.py).
    """
    bounds, cumulative = [0], 0.0
    for share in shares:
        cumulative += share
        bounds.append(int(round(cumulative * count)))
    return bounds


def empty_split(
    name: str, where: str, sequences: int, tokens: int, split: str, sample: int, held_tokens: int | None = None
) -> str:
    """A sentence if one dataset leaves a split without a sample; empty if it does not.

    Args:
        name: ``valid`` or ``test``.
        where: prefix of the dataset.
        sequences: number of its sequences, which are divided.
        tokens: their number.
        split: the shares, as in ``969,30,1``.
        sample: tokens of one sample.
        held_tokens: tokens of the split; None: in proportion to its sequences.
    """
    shares = parse_split(split)
    number = ("train", "valid", "test").index(name)
    start, stop = split_bounds(sequences, shares)[number : number + 2]
    held, about = stop - start, "" if held_tokens is not None else "about "
    if held and held_tokens is None:
        held_tokens = tokens * held // sequences
    if not shares[number] or (held and (held_tokens or 0) >= sample):
        return ""
    what = f"{about}{held_tokens:,} tokens, and one sample needs {sample:,}" if held else "no document"
    return (
        f"the {name} split of {where} has {what}: {sequences:,} documents are divided by data.split {split}; set it to "
        "80,20,0, say, or prepare more documents (--text-document paragraph cuts a text file at blank lines)"
    )

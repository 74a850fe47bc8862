"""Blends with a range of documents for each dataset, as bigscience's Megatron-DeepSpeed writes them. Torch-free.

A group is ``NAME: WEIGHT START:END PATH, WEIGHT START:END PATH``. Source: megatron/arguments.py (parse_data_paths) and
megatron/data/dataset_utils.py (get_split_by_range_) of bigscience-workshop/Megatron-DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

_KEYS = {"train": "data.train_data_path", "valid": "data.valid_data_path", "test": "data.test_data_path"}
_BLEND, _SPLIT = "data.data_path", "data.split"
_FLAG = "{}-weighted-split-paths"
WEIGHTED_FLAGS: Mapping[str, tuple[str, ...]] = {
    _FLAG.format(name): (key, _BLEND, _SPLIT) for name, key in _KEYS.items()
}
"""Flag -> keys that it may set."""
WEIGHTED_FILES: Mapping[str, str] = {f"{flag}-path": flag for flag in WEIGHTED_FLAGS}
"""Flag that names a file with the groups -> the flag that takes the groups."""
_WHOLE = (Decimal(0), Decimal(1))


@dataclass(frozen=True)
class _Group:
    datasets: tuple[str, ...]
    ranges: frozenset[tuple[Decimal, Decimal]]


def weighted_values(given: Mapping[str, Sequence[str]]) -> dict[str, list[str] | str]:
    """Values of keys by these flags.

    Args:
        given: the flags with their groups.

    Raises:
        ValueError: a sentence that begins with the flag.
    """
    flags = {name: _FLAG.format(name) for name in _KEYS}
    groups = {name: _group(flag, given[flag]) for name, flag in flags.items() if flag in given}
    if not groups:
        return {}
    if all(group.ranges == {_WHOLE} for group in groups.values()):
        return {_KEYS[name]: list(group.datasets) for name, group in groups.items()}
    first = flags[next(iter(groups))]
    bounds = [Decimal(0)]
    for name in _KEYS:
        start, end = next(iter(groups[name].ranges)) if name in groups else (bounds[-1], bounds[-1])
        is_next = name not in groups or (len(groups[name].ranges) == 1 and start == bounds[-1])
        if not is_next:
            break
        bounds.append(end)
    is_one_blend = len({group.datasets for group in groups.values()}) == 1
    if not is_one_blend or len(bounds) != len(_KEYS) + 1 or bounds[-1] != 1:
        raise ValueError(
            f"--{first}: ranges that are not those of one --split of the same datasets and weights are not supported; "
            "use 0:1 with datasets for each, or --data-path with --split"
        )
    shares = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
    return {_BLEND: list(groups[next(iter(groups))].datasets), _SPLIT: ",".join(map(str, shares))}


def groups_of_file(text: str) -> list[str]:
    """The groups of a file, each in double quotes on its only line."""
    line = text.strip()
    return line[1:-1].split('" "') if line[:1] == line[-1:] == '"' else [line]


def _group(flag: str, words: Sequence[str]) -> _Group:
    if len(words) != 1:
        raise ValueError(
            f"--{flag}: takes one group in quotes, NAME: WEIGHT START:END PATH, ..., not {len(words)}; "
            "further groups of validation data are not evaluated"
        )
    datasets: list[str] = []
    ranges = set()
    for part in (words[0].partition(":")[2] or words[0]).split(","):
        fields = part.split()
        try:
            weight, span, path = fields
            start, end = map(Decimal, span.split(":"))
            is_valid = 0 <= start < end <= 1 and Decimal(weight).is_finite() and Decimal(weight) > 0
        except (ValueError, InvalidOperation):
            is_valid = False
        if not is_valid:
            raise ValueError(f"--{flag}: {part.strip()!r} is not WEIGHT START:END PATH, as in 0.3 0:0.95 a")
        ranges.add((start, end))
        datasets += [weight, path]
    return _Group(tuple(datasets[1:] if len(datasets) == 2 else datasets), frozenset(ranges))

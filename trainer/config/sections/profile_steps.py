"""Steps of a profile: the key, and flags of Megatron-LM and its forks that ask for one. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

STEPS = "logging.profile_steps"
MAX_STEPS = 20
"""Longest profile: a trace has some 10,000 events for each step of each layer, which viewers must hold."""
FLAGS = ("profile", "use-pytorch-profiler", "profile-step-start", "profile-step-end")
"""The flags, which only together ask for a profile."""
NO_PROFILE = (
    "only --profile with --use-pytorch-profiler writes a profile; marks for Nsight Systems are not set. "
    "--profile-steps FIRST LAST alone writes one too"
)
_START, _END = 10, 12
"""Megatron-LM's defaults, megatron/training/config/common_config.py."""
_DEEPSPEED = ("pt", "pt-full")
_DEEPSPEED_STEPS = [2, 3]
"""Megatron-DeepSpeed's default of --profile_steps, megatron/arguments.py: both are recorded, as here."""


def first_and_last(value: Any) -> list[int]:
    """The two numbers of ``logging.profile_steps``, also in Megatron-DeepSpeed's spelling ``2,3``.

    Raises:
        ValueError: a sentence about the numbers, without the key.
    """
    if isinstance(value, str):
        value = value.split(",")
    elif isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], str):
        value = value[0].split(",")
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError("needs the first and the last iteration to record, as in [10, 12]; leave it out for none")
    try:
        numbers = [int(each) if isinstance(each, str) else each for each in value]
    except ValueError:
        numbers = []
    if not numbers or not all(type(each) is int and each >= 1 for each in numbers):
        raise ValueError("needs two whole numbers from 1, as in [10, 12]")
    first, last = numbers
    if last < first:
        raise ValueError(f"the last iteration {last} is before the first {first}; exchange them")
    if last - first >= MAX_STEPS:
        raise ValueError(
            f"has {last - first + 1} iterations, and a profile has at most {MAX_STEPS}; use [{first}, "
            f"{first + MAX_STEPS - 1}], or fewer"
        )
    return numbers


def steps_of(given: Mapping[str, Sequence[str]]) -> list[int] | None:
    """The steps that the flags ask for; None if they ask for no profile of torch's.

    Megatron-LM's own profile begins with iteration --profile-step-start, counted from 1, and ends before
    --profile-step-end (megatron/training/training.py: ``active`` of torch's schedule).

    Args:
        given: flags of ``FLAGS`` and their values.

    Raises:
        ValueError: one sentence that begins with the flag.
    """
    kinds = given.get("profile", ())
    if kinds and (len(kinds) > 1 or kinds[0] not in _DEEPSPEED):
        raise ValueError(
            f"--profile: {' '.join(kinds)!r} is not valid; give it alone, or use {' or '.join(_DEEPSPEED)}"
        )
    if given.get("use-pytorch-profiler"):
        raise ValueError("--use-pytorch-profiler: takes no value; give it alone")
    start, end = _number(given, "profile-step-start", _START), _number(given, "profile-step-end", _END)
    if kinds:
        return _DEEPSPEED_STEPS
    if "profile" not in given or "use-pytorch-profiler" not in given:
        return None
    # Before the first iteration nothing runs.
    first = max(start, 1)
    if end <= first:
        raise ValueError(f"--profile-step-end: {end} is not valid: the profile ends before it; use {first + 1} or more")
    return [first, end - 1]


def _number(given: Mapping[str, Sequence[str]], flag: str, default: int) -> int:
    if flag not in given:
        return default
    values = given[flag]
    if len(values) != 1 or not values[0].isdecimal():
        raise ValueError(f"--{flag}: takes one whole number")
    return int(values[0])

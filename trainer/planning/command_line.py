"""Flags of a training run, in Megatron-LM's words, as values of the training config. Torch-free."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config.counted_flags import COUNTED, iterations_of
from trainer.config.errors import ConfigError
from trainer.config.forks.ignored import DENSE, EXPERTS_REFUSED, expert_flags
from trainer.config.joint.flags import JOINT_FLAGS, joint_values
from trainer.config.megatron_flags import (
    ALIASES,
    ONE_OF_SEVERAL,
    REFUSED,
    SPELLINGS,
    SQUARE_ROOTS,
    WITHOUT_EFFECT,
    Alias,
)
from trainer.config.paths.variables import check_no_variables, replace_variables
from trainer.config.sections.profile_steps import FLAGS, NO_PROFILE, STEPS, steps_of
from trainer.config.train_config import TrainConfig
from trainer.config.yaml_file import read_yaml
from trainer.planning.build_config import build_config, known_keys, names_start

_TRUE, _FALSE = ("true", "True", "1"), ("false", "False", "0")

_EXPERTS = "model.num_experts"
_MOST_EDITS = 2
_LETTERS_PER_EDIT = 5


class UsageError(ValueError):
    """An unusable flag. The message names the flag and a remedy."""


@dataclass
class CommandLine:
    """Parsed flags.

    Attributes:
        config_file: the YAML file, if any.
        values: dotted key -> value.
        notes: one sentence per accepted flag without effect.
    """

    config_file: Path | None = None
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def flag_keys() -> dict[str, str]:
    """Flag without dashes -> dotted key, for every config key that the trainer reads."""
    return {key.rpartition(".")[2].replace("_", "-"): key for key in known_keys() if not key.startswith("job.")}


def parse_command_line(arguments: Sequence[str]) -> CommandLine:
    """Sort the flags into config values and notes.

    Raises:
        UsageError: an unknown flag (names the nearest known one), a refused flag, or a wrong number of values.
    """
    result = CommandLine()
    keys = flag_keys()
    yielding: dict[str, Any] = {}
    counted: dict[str, str] = {}
    flags = _flags(arguments)
    for flag, values in _take_profile(flags, result):
        if flag == "config":
            result.config_file = Path(_one(flag, values))
        elif flag in keys:
            result.values[keys[flag]] = _key_value(flag, keys[flag], values)
        elif flag in ALIASES:
            _take_alias(flag, values, result.values, yielding)
        elif flag in SQUARE_ROOTS:
            _none(flag, values, None)
        elif flag in COUNTED:
            counted[flag] = _one(flag, values)
        elif flag in WITHOUT_EFFECT:
            result.notes.append(_without_effect(flag, values))
        elif flag in REFUSED:
            raise UsageError(f"--{flag}: {REFUSED[flag]}")
        else:
            raise UsageError(_unknown(flag, keys))
    try:
        # Last: counts of samples become iterations by the batch size, which may stand behind them.
        result.values.update(iterations_of(counted, result.values))
        _take_joint(flags, result)
    except ValueError as error:
        raise UsageError(str(error)) from None
    _take_square_roots(flags, result.values)
    _take_bigscience_sizes([flag for flag, _ in flags], result.values)
    _fill_in(result.values, yielding)
    _take_out_experts([flag for flag, _ in flags], result)
    return result


def _take_profile(flags: Sequence[tuple[str, list[str]]], line: CommandLine) -> list[tuple[str, list[str]]]:
    """The flags with a meaning of their own; those that together ask for a profile are taken into ``line``."""
    given = {flag: values for flag, values in flags if flag in FLAGS}
    try:
        steps = steps_of(given)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if steps is not None:
        # The key's own flag replaces them.
        line.values[STEPS] = steps
    elif all(flag != "profile-steps" for flag, _ in flags):
        line.notes += [f"--{' '.join([flag, *given[flag]])} is without effect here: {NO_PROFILE}" for flag in given]
    return [one for one in flags if one[0] not in FLAGS and one[0] not in JOINT_FLAGS]


def _take_joint(flags: Sequence[tuple[str, Sequence[str]]], line: CommandLine) -> None:
    joint = {flag: values for flag, values in flags if flag in JOINT_FLAGS}
    found, idle = joint_values(joint, line.values)
    line.values.update(found)
    line.notes += [f"--{' '.join([flag, *joint[flag]])} is without effect here: {why}" for flag, why in idle.items()]


def _take_alias(flag: str, values: Sequence[str], settled: dict[str, Any], yielding: dict[str, Any]) -> None:
    first = ALIASES[flag]
    for alias in (first, *first.also):
        target = yielding if alias.yields else settled
        value = _alias_value(flag, alias, values) if alias is first else alias.value
        target[alias.key] = value if alias.entry is None else {**target.get(alias.key, {}), alias.entry: value}


def _take_square_roots(flags: Sequence[tuple[str, Sequence[str]]], settled: dict[str, Any]) -> None:
    for flag in [flag for flag, _ in flags if flag in SQUARE_ROOTS]:
        key, of = SQUARE_ROOTS[flag]
        text = str(settled.get(of, ""))
        if not text.isdecimal():
            raise UsageError(f"--{flag}: is the square root of --{of.rpartition('.')[2].replace('_', '-')}; give both")
        settled.setdefault(key, math.sqrt(int(text)))


def _take_bigscience_sizes(flags: Sequence[str], settled: dict[str, Any]) -> None:
    """Sizes of bigscience's Megatron-DeepSpeed: gated layers 4 x hidden_size wide, and a vocabulary padded at once."""
    if "pad-vocab-size-to" in flags:
        settled["model.make_vocab_size_divisible_by"] = 1
    hidden = str(settled.get("model.hidden_size", ""))
    if "glu-activation" in flags and hidden.isdecimal():
        settled.setdefault("model.ffn_hidden_size", 4 * int(hidden))


def _take_out_experts(flags: Sequence[str], line: CommandLine) -> None:
    """Of a command line of Megatron-DeepSpeed, where a single expert means none."""
    given = [flag for flag in flags if flag in expert_flags()]
    if not given or _EXPERTS not in line.values:
        return
    if line.values[_EXPERTS] != "1":
        raise UsageError(f"--{given[0]}: {EXPERTS_REFUSED}")
    del line.values[_EXPERTS]
    line.notes.append(f"--num-experts 1 is without effect here: {DENSE}")


def _fill_in(settled: dict[str, Any], yielding: dict[str, Any]) -> None:
    for key, value in yielding.items():
        given = settled.setdefault(key, value)
        if isinstance(value, dict) and isinstance(given, dict):
            settled[key] = {**value, **given}


def _flags(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    flags: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("--") and len(argument) > 2:
            name, equals, value = argument[2:].partition("=")
            # Megatron-DeepSpeed and torchrun write some flags with underscores.
            flags.append((name.replace("_", "-"), [value] if equals else []))
        elif flags:
            flags[-1][1].append(argument)
        else:
            raise UsageError(f"{argument!r}: is not a flag; use flags only, such as --config FILE or --train-iters 100")
    return flags


def _alias_value(flag: str, alias: Alias, values: Sequence[str]) -> Any:
    if alias.value is not None:
        return _none(flag, values, alias.value)
    value = _one(flag, values)
    if alias.words is None:
        return value
    if value not in alias.words:
        raise UsageError(f"--{flag}: {value!r} is not valid; use {' or '.join(alias.words)}")
    return alias.words[value]


def _one(flag: str, values: Sequence[str]) -> str:
    if len(values) != 1:
        quotes = "; put a value with spaces into quotes" if values else ""
        raise UsageError(f"--{flag}: takes one value, not {len(values)}{quotes}")
    return values[0]


def _none(flag: str, values: Sequence[str], meaning: Any) -> Any:
    if values:
        raise UsageError(f"--{flag}: takes no value; remove {' '.join(values)!r}")
    return meaning


def _key_value(flag: str, key: str, values: Sequence[str]) -> Any:
    section, _, name = key.partition(".")
    section_type = TrainConfig.model_fields[section].annotation
    assert section_type is not None
    annotation = section_type.model_fields[name].annotation
    if annotation is bool:
        if not values or values[0] in _TRUE:
            return _none(flag, values[1:], True)
        if values[0] in _FALSE:
            return _none(flag, values[1:], False)
        raise UsageError(f"--{flag}: is a switch; give it alone, or with true or false")
    if dict in [typing.get_origin(kind) for kind in (annotation, *typing.get_args(annotation))]:
        if not values or not all("=" in value for value in values):
            raise UsageError(f"--{flag}: takes one or more NAME=VALUE")
        return dict(value.split("=", 1) for value in values)
    if typing.get_origin(annotation) is list or annotation == (list[int] | None):
        if not values:
            raise UsageError(f"--{flag}: takes one or more values")
        return list(values)
    if flag in ONE_OF_SEVERAL and len(set(values)) > 1:
        raise UsageError(f"--{flag}: {' '.join(values)!r} is not valid: {ONE_OF_SEVERAL[flag]}")
    value = _one(flag, values[:1] if flag in ONE_OF_SEVERAL else values)
    return SPELLINGS.get(flag, {}).get(value, value)


def _without_effect(flag: str, values: Sequence[str]) -> str:
    accepted = WITHOUT_EFFECT[flag]
    if accepted.values < 0 and not values:
        raise UsageError(f"--{flag}: takes one or more values")
    if 0 <= accepted.values != len(values):
        raise UsageError(f"--{flag}: takes {accepted.values or 'no'} value{'s' * (accepted.values != 1)}")
    if accepted.only and values[0] not in accepted.only:
        remedy = accepted.otherwise or f"use {' or '.join(accepted.only)}"
        raise UsageError(f"--{flag}: {values[0]!r} is not available here; {remedy}")
    return f"--{' '.join([flag, *values])} is without effect here: {accepted.reason}"


def _unknown(flag: str, keys: Mapping[str, str]) -> str:
    near = _nearest_word(flag, [*keys, *ALIASES, *COUNTED, *SQUARE_ROOTS, *JOINT_FLAGS, *WITHOUT_EFFECT, "config"])
    return f"--{flag}: unknown flag" + (f"; did you mean --{near}?" if near else "; flags are the config's keys")


def build_train_config(command_line: CommandLine, environment: Mapping[str, str] | None = None) -> TrainConfig:
    """The config file, if any, overridden by the flags.

    Args:
        command_line: the flags, sorted.
        environment: with the values of the variables in paths; None if the paths have none, as in a run of llmctl.

    Raises:
        ConfigError: see trainer.planning.build_config.build_config; the message names the file if the file is wrong.
    """
    values: dict[str, Any] = {}
    if command_line.config_file is not None:
        values = read_yaml(command_line.config_file)
    for key, value in command_line.values.items():
        section, _, name = key.partition(".")
        if not isinstance(values.get(section, {}), dict):
            raise ConfigError(section, "is a section; give it keys, not a value")
        values[section] = {**values.get(section, {}), name: value}
    if environment is not None:
        values = replace_variables(values, environment)
        check_no_variables(values)
    if names_start(values):
        from trainer.planning.start_model import LocalFiles, completed

        return build_config(completed(values, LocalFiles()))
    return build_config(values)


def _nearest_word(word: str, known: Iterable[str]) -> str | None:
    """The known word that is at most two letters away, fewer for a short word; None without one."""
    limit = min(_MOST_EDITS, len(word) // _LETTERS_PER_EDIT)
    near = [(_edits(word, other), other) for other in known if abs(len(other) - len(word)) <= limit]
    return min((pair for pair in near if pair[0] <= limit), default=(0, None))[1]


def _edits(first: str, second: str) -> int:
    """Letters to insert, delete or replace to turn one word into the other (Levenshtein 1966)."""
    row = list(range(len(second) + 1))
    for count, letter in enumerate(first, 1):
        above, row[0] = row[0], count
        for place, other in enumerate(second, 1):
            above, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, above + (letter != other))
    return row[-1]

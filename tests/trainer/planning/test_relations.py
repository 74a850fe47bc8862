"""A check that is skipped would not have refused the config: its keys are all that it is about."""

from __future__ import annotations

import random
import typing
from collections.abc import Mapping
from types import UnionType
from typing import Any

import pytest

from tests.trainer.planning.refused_combinations import REFUSED
from trainer.config.errors import ConfigError
from trainer.config.train_config import TrainConfig
from trainer.planning import checks
from trainer.planning.build_config import build_config

NEEDED: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4},
    "training": {"train_iters": 10, "seq_length": 64},
    "optimizer": {"lr": 1e-3},
}
SECTIONS = ("model", "parallel", "training", "optimizer", "data", "checkpoint", "evaluation")
GIVEN: dict[str, Any] = {
    "pipeline_model_parallel_layout": ["Ett|ttL"],
    "rope_scaling": [{"rope_type": "linear", "factor": 2.0}, {"rope_type": "linear"}],
    "kernel_backends": [{"adamw": "torch"}, {"no_such": "torch"}],
    "split": ["1", "0,1"],
    "data_path": [["/a"], ["0.3", "/a"]],
    "tokenizer_model": ["/t"],
}
"""Values of keys whose type says little."""


def values_of(annotation: Any) -> list[Any]:
    """A few values of a type."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return list(inner)
    if origin is typing.Annotated:
        return values_of(inner[0])
    if origin in (typing.Union, UnionType):
        return [value for part in inner for value in values_of(part)]
    if annotation is bool:
        return [True, False]
    if annotation in (int, float):
        return [annotation(number) for number in (0, 1, 2, 3, 4, 8)] if annotation is int else [0.0, 0.5, 1.0, 2.0]
    return []


def every_key() -> list[tuple[str, str, list[Any]]]:
    found = []
    for section in SECTIONS:
        fields = TrainConfig.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
        for key, field in fields.items():
            values = GIVEN.get(key) or values_of(field.annotation)
            if values:
                found.append((section, key, values))
    return found


KEYS = every_key()


def problem_of(values: Mapping[str, Any]) -> str | None:
    try:
        build_config(values)
    except ConfigError as error:
        return str(error)
    return None


def assert_same(values: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> bool:
    """The problem is the same if every check runs; True if there is one."""
    found = problem_of(values)
    with monkeypatch.context() as patched:
        patched.setattr(checks.Relation, "concerns", lambda *_: True)
        assert found == problem_of(values), values
    return found is not None


def test_every_refused_combination_is_refused_by_the_checks_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, *_ in REFUSED:
        values = {name: {**NEEDED.get(name, {}), **asked.get(name, {})} for name in NEEDED.keys() | asked.keys()}
        assert assert_same(values, monkeypatch)


def test_single_keys_and_pairs_are_judged_as_by_all_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(29)
    sets = [[(*one[:2], value)] for one in KEYS for value in one[2]]
    for count in (2, 3):
        sets += [[(*one[:2], draw.choice(one[2])) for one in draw.sample(KEYS, count)] for _ in range(700)]
    refused = 0
    for chosen in sets:
        values = {name: dict(section) for name, section in NEEDED.items()}
        for section, key, value in chosen:
            values.setdefault(section, {})[key] = value
        refused += assert_same(values, monkeypatch)
    assert refused > 100

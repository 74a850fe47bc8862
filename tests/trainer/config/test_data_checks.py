"""Checks of the data section: splits, blends with weights, and incompatible keys."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from tests.trainer.config.test_config import values
from trainer.config.blends import BlendPart, parse_blend, parse_split, path_entries, weight_places
from trainer.config.errors import ConfigError
from trainer.planning.build_config import build_config


@pytest.mark.parametrize(
    "split",
    [
        *("-1,1,0", "90,abc5,5", "1,2,3,4", "0,0,0", "nan,1,1", "inf,1,0", "1e400,1", "", ",", "90,,10", "90;10"),
        *("1_0,1", "0x10,1", "1e308,1e308"),
    ],
)
def test_invalid_splits_are_refused_in_one_sentence(split: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(values(data={"split": split}))
    assert caught.value.key == "data.split"
    assert caught.value.problem == (
        f"{split!r} is not one to three non-negative numbers separated by commas, as in 969,30,1"
    )


@pytest.mark.parametrize(
    ("split", "shares"),
    [("949,50,1", (949, 50, 1)), ("1", (1, 0, 0)), (" 8 , 2", (8, 2, 0)), (".5,1e-1,0.4", (0.5, 0.1, 0.4))],
)
def test_splits_are_shares_of_their_sum(split: str, shares: tuple[float, ...]) -> None:
    total = sum(map(Fraction, shares))
    assert parse_split(split) == pytest.approx(
        tuple(float(share / total) for share in map(Fraction, shares)), abs=1e-16
    )


def test_shares_are_rounded_as_numpy_rounds_them() -> None:
    # From left to right 0.1 + 0.2 + 0.3 is 0.6000000000000001; an exact sum rounds to 0.6.
    assert parse_split("0.1,0.2,0.3") == (0.1 / (0.1 + 0.2 + 0.3), 0.2 / (0.1 + 0.2 + 0.3), 0.3 / (0.1 + 0.2 + 0.3))


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("a", [("a", None)]),
        ("my data/a b", [("my data/a b", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
        ("0.3 a 0.7 b", [("a", 0.3), ("b", 0.7)]),
        ([30, "a", 70.5, "b"], [("a", 30), ("b", 70.5)]),
        (["1e-9", "a", "1", "./2"], [("a", 1e-9), ("./2", 1)]),
        (["0.5", "my data/a", "0", "b"], [("my data/a", 0.5), ("b", 0)]),
        ([], []),
    ],
)
def test_data_paths_are_prefixes_or_pairs(given: Any, parts: list[tuple[str, float | None]]) -> None:
    config = build_config(values(data={"data_path": given}))
    named = tuple(BlendPart(*part) for part in parts if part[1] != 0)
    assert parse_blend("data.data_path", config.data.data_path) == named


@pytest.mark.parametrize(
    ("data", "key", "says"),
    [
        ({"data_path": ["0.3", "a", "b"]}, "data.data_path", "neither prefixes alone nor pairs"),
        ({"data_path": "1 a b"}, "data.data_path", "'1 a b' is neither prefixes alone nor pairs"),
        ({"data_path": ["0.3 a 0.7 b c"]}, "data.data_path", "neither prefixes alone nor pairs"),
        ({"data_path": "1e308 a 1e308 b"}, "data.data_path", "overflows float64; use shares"),
        ({"data_path": "nan a 1 b"}, "data.data_path", "the weight nan of a is not a number >= 0"),
        ({"data_path": ["a", "0.3", "b", "0.7"]}, "data.data_path", "give a weight to every prefix or to none"),
        ({"data_path": ["3"]}, "data.data_path", "for a file named 3 write ./3"),
        ({"data_path": ["-1", "a"]}, "data.data_path", "the weight -1 of a"),
        ({"data_path": "nan a 1 b"}, "data.data_path", "the weight nan of a"),
        ({"data_path": ["inf", "a", "1", "b"]}, "data.data_path", "the weight inf of a"),
        ({"data_path": ["0", "a", "0", "b"]}, "data.data_path", "all weights are 0"),
        ({"train_data_path": "a", "valid_data_path": ["0", "b"]}, "data.valid_data_path", "all weights are 0"),
        ({"data_path": "a", "test_data_path": "b"}, "data.test_data_path", "needs data.train_data_path"),
        ({"data_path": "a", "answer_only_loss": True}, "data.answer_only_loss", "needs data.sample_packing"),
        ({"mock_data": True, "sample_packing": True}, "data.sample_packing", "cannot pack data.mock_data"),
        (
            {"data_path": "a", "sample_packing": True, "sample_order": "megatron"},
            "data.sample_order",
            "use stable with data.sample_packing",
        ),
    ],
)
def test_conflicting_keys_are_refused(data: dict[str, Any], key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        build_config(values(data=data))
    assert caught.value.key == key
    assert "\n" not in caught.value.problem


def test_weights_are_distinguished_from_paths() -> None:
    assert path_entries({"a": 1}) == {"a": 1}
    assert list(weight_places(["1", "a", "2", "b"])) == [0, 2]
    assert list(weight_places(["a", "b"])) == []

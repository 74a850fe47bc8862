"""Profiles that are refused: see refused_combinations.py."""

from __future__ import annotations

from typing import Any

_VALID = {"logging": {"profile_steps": [2, 4]}}
_RANKS = {"logging": {"profile_ranks": [0, 1]}}

REFUSED_PROFILES: list[tuple[dict[str, dict[str, Any]], str, str, dict[str, dict[str, Any]]]] = [
    ({"logging": {"profile_steps": steps}}, "logging.profile_steps", part, _VALID)
    for steps, part in (
        ([], "needs the first and the last iteration to record"),
        ([2], "needs the first and the last iteration to record"),
        ([2, 3, 4], "needs the first and the last iteration to record"),
        (4, "needs the first and the last iteration to record"),
        ([0, 4], "needs two whole numbers from 1"),
        ([2.0, 4], "needs two whole numbers from 1"),
        ([True, 4], "needs two whole numbers from 1"),
        (["2", "x"], "needs two whole numbers from 1"),
        ([4, 2], "the last iteration 2 is before the first 4; exchange them"),
        ([1, 21], "has 21 iterations, and a profile has at most 20; use [1, 20], or fewer"),
        ([2, 12], "[2, 12] is beyond the last iteration, training.train_iters 10; use earlier ones"),
    )
] + [
    ({"logging": {"profile_ranks": []}}, "logging.profile_ranks", "has no rank; give at least one", _RANKS),
    ({"logging": {"profile_ranks": [True]}}, "logging.profile_ranks", "needs whole numbers, not true", _RANKS),
    ({"logging": {"profile_ranks": [-1]}}, "logging.profile_ranks", "greater than or equal to 0", _RANKS),
]

"""Nearest known word of a misspelt one. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable

_MOST_EDITS = 2
_LETTERS_PER_EDIT = 5


def nearest_word(word: str, known: Iterable[str]) -> str | None:
    """The known word that is at most two letters away, fewer for a short word; None without one."""
    limit = min(_MOST_EDITS, len(word) // _LETTERS_PER_EDIT)
    near = [(edits(word, other), other) for other in known if abs(len(other) - len(word)) <= limit]
    return min((pair for pair in near if pair[0] <= limit), default=(0, None))[1]


def edits(first: str, second: str) -> int:
    """Letters to insert, delete or replace to turn one word into the other (Levenshtein 1966)."""
    row = list(range(len(second) + 1))
    for count, letter in enumerate(first, 1):
        above, row[0] = row[0], count
        for place, other in enumerate(second, 1):
            above, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, above + (letter != other))
    return row[-1]

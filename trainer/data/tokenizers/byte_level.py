"""Bytes as letters: how byte-level BPE vocabularies spell their tokens (GPT-2's vocab.json and every later one).

Each byte that is a visible character of Latin-1 is that character; the others are the characters from U+0100 on, in the
order of their values, so that a space is U+0120 and a line end U+010A.
"""

from __future__ import annotations

from collections.abc import Container
from functools import cache

_VISIBLE = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))


@cache
def byte_letters() -> tuple[str, ...]:
    """The letter of each of the 256 bytes."""
    letters: list[str] = []
    hidden = 0
    for value in range(256):
        if any(value in part for part in _VISIBLE):
            letters.append(chr(value))
        else:
            letters.append(chr(256 + hidden))
            hidden += 1
    return tuple(letters)


@cache
def _values() -> dict[str, int]:
    return {letter: value for value, letter in enumerate(byte_letters())}


def bytes_of(piece: str) -> bytes | None:
    """The bytes that ``piece`` spells; None if it has a letter that stands for no byte."""
    values = _values()
    try:
        return bytes(values[letter] for letter in piece)
    except KeyError:
        return None


def missing_bytes(pieces: Container[str]) -> int:
    """How many of the 256 bytes are no piece of their own in ``pieces``."""
    return sum(letter not in pieces for letter in byte_letters())

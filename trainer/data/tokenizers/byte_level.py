"""Spelling of bytes as letters in byte-level BPE vocabularies (GPT-2's vocab.json and its successors).

A byte that is a visible character of Latin-1 is spelled as this character. The other bytes, in the order of their
values, are the characters from U+0100 on, so that a space is U+0120 and a line end U+010A.
"""

from __future__ import annotations

from collections.abc import Container
from functools import cache

_VISIBLE = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))


@cache
def byte_letters() -> tuple[str, ...]:
    """Return the letter of each of the 256 bytes."""
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
    """Return the bytes that ``piece`` spells; None for letters that stand for no byte."""
    values = _values()
    try:
        return bytes(values[letter] for letter in piece)
    except KeyError:
        return None


def missing_bytes(pieces: Container[str]) -> int:
    """Return the number of bytes that have no single-byte piece in ``pieces``."""
    return sum(letter not in pieces for letter in byte_letters())

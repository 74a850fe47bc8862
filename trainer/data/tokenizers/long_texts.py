"""Cuts a long text where both parts have the tokens that they have in it, that no library holds all of it at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

LONG = 1 << 19
"""Characters of a text that is cut. The tokenizers library takes about 140 bytes for each while it encodes."""
SLICE = 1 << 18
_WINDOW = 256
_SEAM = re.compile(r"[a-z](?= [a-z])")
"""Between a word and the space before the next: what cuts texts into words cuts here, or merges with the space."""
_TRIES = 64


def slices(text: str, encode: Callable[[str], Sequence[int]], drop_space: bool = False) -> Iterator[str]:
    """``text`` in parts of about SLICE characters, or longer ones where no place is found to cut it.

    A place will do if what stands about it has the same tokens whole and cut, which proves something only where words
    are encoded one by one, or no token holds the end of one and the space behind it.

    Args:
        text: to be cut.
        encode: gives the tokens of a short text.
        drop_space: leave the space at a cut out, where the tokenizer puts one in front of every text.
    """
    start = 0
    while len(text) - start > LONG and (seam := _seam(text, start + SLICE, encode, drop_space)):
        yield text[start:seam]
        start = seam + drop_space
    yield text[start:]


def _seam(text: str, after: int, encode: Callable[[str], Sequence[int]], drop_space: bool) -> int:
    for match in islice(_SEAM.finditer(text, after), _TRIES):
        place = match.end()
        before, behind = text[place - _WINDOW : place], text[place : place + _WINDOW]
        if encode(before + behind) == [*encode(before), *encode(behind[drop_space:])]:
            return place
    return 0

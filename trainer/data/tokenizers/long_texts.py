"""Cuts a long text where both parts have the tokens that they have in it, that no library holds all of it at once."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from trainer.data.errors import DataError

LONG = 1 << 19
"""Characters of a text that is cut. The tokenizers library takes about 140 bytes for each while it encodes."""
SLICE = 1 << 18
_WINDOW = 256
_SEAM = re.compile(r"[a-z](?= [a-z])")
"""Between a word and the space before the next: what cuts texts into words cuts here, or merges with the space."""
_TRIES = 64
TOLD_BYTES = 250_000_000
"""Of memory: a text that takes more is told of before it is encoded."""
MOST_BYTES = 4_000_000_000
"""Of memory: a text that would take more is refused, whatever the machine has, that all make the same of it."""


class WholeTexts:
    """Keeps watch over texts that a library is given whole, because nothing tells where they may be cut.

    Args:
        library: its name.
        bytes_each: of memory that it takes for a byte of a text, while it encodes.
    """

    def __init__(self, library: str, bytes_each: int) -> None:
        self._library = library
        self._bytes_each = bytes_each
        self._told = TOLD_BYTES // 2

    def check(self, text: str) -> None:
        """Say what memory a long text takes; each that takes twice as much as the one that was told last.

        Raises:
            DataError: it would take more than MOST_BYTES.
        """
        if 4 * len(text) * self._bytes_each <= TOLD_BYTES:
            return  # UTF-8 has at most four bytes for each
        size = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        memory = size * self._bytes_each
        takes = f"up to {memory / 1e9:,.1f} GB of memory, as {self._library} cannot be given it in parts"
        if memory > MOST_BYTES:
            raise DataError(
                f"a text of {size / 1e6:,.0f} MB would take {takes}; divide the document (plain text: --text-document "
                "paragraph or line), or take a vocabulary of byte-level BPE"
            )
        if memory > max(TOLD_BYTES, 2 * self._told):
            self._told = memory
            print(f"a text of {size / 1e6:,.0f} MB takes {takes}", file=sys.stderr, flush=True)


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

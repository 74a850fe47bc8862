"""The memory of long texts: libraries hold a document as a whole, with 40 to 190 bytes for each of its bytes."""

from __future__ import annotations

import sys

from trainer.data.errors import DataError

TOLD_BYTES = 250_000_000
"""Of memory: a text that takes more is told of before it is encoded."""
MOST_BYTES = 4_000_000_000
"""Of memory: a text that would take more is refused, whatever the machine has, that all make the same of it."""


class WholeTexts:
    """A limit on the memory that a library takes for one text.

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
        takes = f"up to {memory / 1e9:,.1f} GB of memory, as {self._library} encodes a document at a time"
        if memory > MOST_BYTES:
            raise DataError(
                f"a text of {size / 1e6:,.0f} MB would take {takes}; divide the document (plain text: --text-document "
                "paragraph or line), or take a vocabulary of byte-level BPE"
            )
        if memory > max(TOLD_BYTES, 2 * self._told):
            self._told = memory
            print(f"a text of {size / 1e6:,.0f} MB takes {takes}", file=sys.stderr, flush=True)

"""Memory limit for long texts.

Libraries hold a whole document, at 40 to 190 bytes of memory per byte of text.
"""

from __future__ import annotations

import sys

from trainer.data.errors import DataError

WARNING_BYTES = 250_000_000
"""Memory above which a text is reported before it is encoded."""
MAX_BYTES = 4_000_000_000
"""Memory above which a text is rejected; the same on every machine, so that results do not depend on the machine."""


class WholeTexts:
    """Limit on the memory that a library takes for one text.

    Args:
        library: name of the library.
        bytes_each: memory in bytes per byte of text while the library encodes.
    """

    def __init__(self, library: str, bytes_each: int) -> None:
        self._library = library
        self._bytes_each = bytes_each
        self._reported = WARNING_BYTES // 2

    def check(self, text: str) -> None:
        """Report the memory of a long text, if over twice the last report.

        Raises:
            DataError: the text would take more than MAX_BYTES.
        """
        if 4 * len(text) * self._bytes_each <= WARNING_BYTES:
            return  # UTF-8 has at most four bytes per character
        size = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        memory = size * self._bytes_each
        takes = f"up to {memory / 1e9:,.1f} GB of memory, because {self._library} encodes a whole document at a time"
        if memory > MAX_BYTES:
            raise DataError(
                f"a text of {size / 1e6:,.0f} MB would take {takes}; divide the document (plain text: --text-document "
                "paragraph or line), or use a byte-level BPE vocabulary"
            )
        if memory > max(WARNING_BYTES, 2 * self._reported):
            self._reported = memory
            print(f"a text of {size / 1e6:,.0f} MB takes {takes}", file=sys.stderr, flush=True)

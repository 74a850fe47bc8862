"""Whether the disk will hold what is still to be written, known long before it is full."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from shutil import disk_usage

from trainer.data.prepare.chunks import Chunk
from trainer.data.prepare.inputs import InputFile, kind_of, packing_of
from trainer.data.prepare.joining import SAVE_BYTES
from trainer.data.prepare.progress import say

_LEAST_SHARE = 1 / 20
_LEAST_BYTES = 64 << 20
"""So much of a kind is known well enough."""
_SECONDS = 10.0


class Room:
    """Reckons from what came of input of a kind and packing what will come of the rest of it, and says so once.

    Code has half as many tokens as prose of the same size, and the next file may be of other text than the first: the
    reckoning stops nothing. While they are joined some of the parts are there twice (SAVE_BYTES), and at the end the
    tables of the index, when no parts are left.

    Args:
        folder: on the file system of the output.
        files: the inputs.
    """

    def __init__(self, folder: Path, files: Sequence[InputFile]) -> None:
        self._folder = folder
        self._total: Counter[str] = Counter()
        for file in files:
            self._total[_class_of(file.path)] += file.size
        self._left = self._total.copy()
        self._read: Counter[str] = Counter()
        self._written: Counter[str] = Counter()
        self._index: Counter[str] = Counter()
        self._next = 0.0
        self._is_told = False

    def begin(self, chunk: Chunk) -> None:
        """``chunk`` is given away, or done already."""
        self._left[_class_of(chunk.spans[0].path)] -= chunk.input_bytes

    def count(self, chunk: Chunk, shard_bytes: int, index_bytes: int) -> None:
        """So much came of ``chunk``, now or in an earlier run.

        Args:
            chunk: that is done.
            shard_bytes: of its shard; 0: it is joined.
            index_bytes: that it will take in the index.
        """
        of = _class_of(chunk.spans[0].path)
        if shard_bytes:
            self._read[of] += chunk.input_bytes
            self._written[of] += shard_bytes
            self._index[of] += index_bytes

    def look(self, at_once: bool = False) -> None:
        """Say it if there is too little room, unless it was said; looks every few seconds, or ``at_once``."""
        if time.monotonic() < self._next and not at_once:
            return
        self._next = time.monotonic() + _SECONDS
        free = disk_usage(self._folder)[2]
        to_come = sum(self._rate(self._written, of) * max(0, self._left[of]) for of in self._total)
        index = sum(self._rate(self._index, of) * self._total[of] for of in self._total)
        needed = round(to_come + max(min(SAVE_BYTES, self._written.total() + to_come), index))
        if free < needed and not self._is_told:
            self._is_told = True
            say(
                f"{self._folder.parent}: there are {free / 1e9:,.3g} GB free, and about {needed / 1e9:,.3g} GB more "
                "will be needed if the rest of the text is like what was read; it goes on, and what is done is kept"
            )

    def _rate(self, made: Counter[str], of: str) -> float:
        """Of what was ``made`` for each byte of input of a kind; 0: too little is known."""
        read, total = self._read[of], self._total[of]
        if read < min(_LEAST_SHARE * total, _LEAST_BYTES) or not read:
            return 0.0
        return made[of] / read


def _class_of(path: str) -> str:
    return f"{kind_of(path)} {packing_of(path)}"

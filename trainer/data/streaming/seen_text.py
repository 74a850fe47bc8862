"""What a run has read of its text, by a digest of each piece, so that it is known again when it is read again.

Text is read again after a resume, as far as it was read ahead of the checkpoint or makes up the block that it fell
into, and in each later epoch. Whatever was edited then, however much text there is, is refused before it is trained on.
Not noticed are edits that change no token, and of those that do one in 4e9.
"""

from __future__ import annotations

import base64
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.streaming.pieces import Piece

DIGEST_BYTES = 4
_UNSEEN = 0


class SeenText:
    """The digests of all pieces that were read. Not safe between threads.

    Memory: 4 bytes per unit (at most 4 MB), and 12 per piece of a compressed file; a third more in a checkpoint.
    """

    def __init__(self, units: int) -> None:
        """Nothing was read.

        Args:
            units: that there are (Pieces.units).
        """
        self._digests: npt.NDArray[np.uint32] = np.zeros(units, np.uint32)
        # Of compressed files, which give several pieces: the places where those begin, ascending, and their digests.
        self._streams: dict[int, tuple[array[int], array[int]]] = {}

    def is_same(self, piece: Piece, digest: int) -> bool:
        """Whether ``piece`` gave what it gave before; one that was never read is remembered.

        Args:
            piece: that was read.
            digest: of what it gave, below 2^32.
        """
        digest = digest or 1
        if piece.content is None:
            before = int(self._digests[piece.unit])
            if before == _UNSEEN:
                self._digests[piece.unit] = digest
            return before in (_UNSEEN, digest)
        offsets, digests = self._streams.setdefault(piece.unit, (array("Q"), array("I")))
        offset = piece.spans[0].start
        place = bisect_left(offsets, offset)
        if place < len(offsets) and offsets[place] == offset:
            return digests[place] == digest
        offsets.insert(place, offset)
        digests.insert(place, digest)
        return True

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "units": _packed(self._digests, "<u4"),
            "streams": [[unit, _packed(o, "<u8"), _packed(d, "<u4")] for unit, (o, d) in sorted(self._streams.items())],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a state.

        Raises:
            ValueError, TypeError, KeyError: it is damaged, or of other text.
        """
        digests = _unpacked(state["units"], "<u4").astype(np.uint32)
        if len(digests) != len(self._digests):
            raise ValueError(f"{len(digests)} units of text, not {len(self._digests)}")
        streams = {}
        for unit, packed_offsets, packed_digests in state["streams"]:
            offsets, of_pieces = _unpacked(packed_offsets, "<u8"), _unpacked(packed_digests, "<u4")
            if len(offsets) != len(of_pieces):
                raise ValueError(f"unit {unit}")
            streams[int(unit)] = (array("Q", offsets.tolist()), array("I", of_pieces.tolist()))
        self._digests, self._streams = digests, streams


def _packed(numbers: npt.ArrayLike, dtype: str) -> str:
    return base64.b64encode(np.asarray(numbers, dtype).tobytes()).decode("ascii")


def _unpacked(text: str, dtype: str) -> npt.NDArray[Any]:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype)

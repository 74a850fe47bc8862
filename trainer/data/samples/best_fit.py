"""Whole pieces of different lengths into as few equal boxes as best fit needs, by the histogram of their lengths."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise

import numpy as np
import numpy.typing as npt


def best_fit(lengths: npt.NDArray[np.int64], capacity: int) -> npt.NDArray[np.int64]:
    """The box of each piece: best fit decreasing, which needs at most 11/9 of the fewest boxes, and 4.

    From the longest to the shortest, each piece goes to the fullest box that has room (Johnson, Demers, Ullman, Garey
    and Graham 1974, doi:10.1137/0203025). All pieces of one length are dealt out at once: the fullest box with room is
    the one that took the last piece for as long as it has room, so that boxes of equal room take equally many.

    Args:
        lengths: of the pieces, from 1 to ``capacity``.
        capacity: of a box.

    Returns:
        Numbers of boxes, from 0 without gaps. How many there are depends on the histogram of ``lengths`` alone, and
        which of equal pieces go together on their order.
    """
    boxes = np.empty(len(lengths), np.int64)
    pieces = np.argsort(-lengths, kind="stable")
    starts = np.flatnonzero(np.diff(lengths[pieces], prepend=0))
    rooms = _Rooms()
    count = 0
    for start, stop in pairwise([*starts.tolist(), len(pieces)]):
        length, left = int(lengths[pieces[start]]), stop - start
        while left:
            room = rooms.smallest(length)
            if room is None:
                room, found = capacity, np.arange(count, count - (-left // (capacity // length)))
                count += len(found)
            else:
                found = rooms.take(room)
            each = room // length
            used = min(len(found), -(-left // each))
            dealt = min(left, each * used)
            boxes[pieces[stop - left : stop - left + dealt]] = np.repeat(found[:used], each)[:dealt]
            # The last box that is used may get fewer than the others.
            rooms.add(room - each * length, found[: used - 1])
            rooms.add(room - (dealt - each * (used - 1)) * length, found[used - 1 : used])
            rooms.add(room, found[used:])
            left -= dealt
    return boxes


class _Rooms:
    """Boxes by the room that is left in them."""

    def __init__(self) -> None:
        self._boxes: dict[int, list[npt.NDArray[np.int64]]] = {}
        self._sorted: list[int] = []

    def smallest(self, length: int) -> int | None:
        """The least room of a box that ``length`` fits into."""
        place = bisect_left(self._sorted, length)
        return self._sorted[place] if place < len(self._sorted) else None

    def take(self, room: int) -> npt.NDArray[np.int64]:
        """Take out all boxes with exactly ``room``."""
        self._sorted.remove(room)
        return np.concatenate(self._boxes.pop(room))

    def add(self, room: int, boxes: npt.NDArray[np.int64]) -> None:
        """Put in boxes with ``room``; full ones and none at all are forgotten."""
        if not room or not len(boxes):
            return
        if room not in self._boxes:
            insort(self._sorted, room)
        self._boxes.setdefault(room, []).append(boxes)

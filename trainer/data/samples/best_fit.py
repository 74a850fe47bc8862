"""Best-fit bin packing of items, by the histogram of their lengths."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise

import numpy as np
import numpy.typing as npt


def best_fit(lengths: npt.NDArray[np.int64], capacity: int) -> npt.NDArray[np.int64]:
    """Assign each item to a bin by best fit decreasing.

    From the longest to the shortest, each item goes to the fullest bin with enough room, which needs at most 11/9 of
    the fewest bins plus 4 (Johnson, Demers, Ullman, Garey and Graham 1974, doi:10.1137/0203025). All items of one
    length are assigned together: the bin that took the last item remains the fullest as long as it has room, so that
    bins of equal room take equally many items.

    Args:
        lengths: lengths of the items, from 1 to ``capacity``.
        capacity: capacity of a bin.

    Returns:
        Bin of each item, numbered from 0 without gaps. The number of bins depends only on the histogram of
        ``lengths``. The order of the items decides which items of equal length share a bin.
    """
    bins = np.empty(len(lengths), np.int64)
    items = np.argsort(-lengths, kind="stable")
    starts = np.flatnonzero(np.diff(lengths[items], prepend=0))
    open_bins = _Bins()
    count = 0
    for start, stop in pairwise([*starts.tolist(), len(items)]):
        length, left = int(lengths[items[start]]), stop - start
        while left:
            room = open_bins.smallest(length)
            if room is None:
                room, found = capacity, np.arange(count, count - (-left // (capacity // length)))
                count += len(found)
            else:
                found = open_bins.take(room)
            each = room // length
            used = min(len(found), -(-left // each))
            dealt = min(left, each * used)
            bins[items[stop - left : stop - left + dealt]] = np.repeat(found[:used], each)[:dealt]
            # The last bin used may get fewer items than the others.
            open_bins.add(room - each * length, found[: used - 1])
            open_bins.add(room - (dealt - each * (used - 1)) * length, found[used - 1 : used])
            open_bins.add(room, found[used:])
            left -= dealt
    return bins


class _Bins:
    """Bins by their remaining room."""

    def __init__(self) -> None:
        self._bins: dict[int, list[npt.NDArray[np.int64]]] = {}
        self._sorted: list[int] = []

    def smallest(self, length: int) -> int | None:
        """Smallest room of a bin into which ``length`` fits; None: no such bin."""
        place = bisect_left(self._sorted, length)
        return self._sorted[place] if place < len(self._sorted) else None

    def take(self, room: int) -> npt.NDArray[np.int64]:
        """Remove and return all bins with exactly ``room``."""
        self._sorted.remove(room)
        return np.concatenate(self._bins.pop(room))

    def add(self, room: int, bins: npt.NDArray[np.int64]) -> None:
        """Add bins with ``room``; full bins are dropped."""
        if not room or not len(bins):
            return
        if room not in self._bins:
            insort(self._sorted, room)
        self._bins.setdefault(room, []).append(bins)

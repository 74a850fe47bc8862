"""Random streams of C++'s std::mt19937 and std::mt19937_64 in arrays, and a shuffle with them.

Matsumoto and Nishimura 1998 (doi:10.1145/272991.272995), and for 64 bits Nishimura 2000 (doi:10.1145/369534.369540);
parameters and seeding are those of the C++ standard, [rand.eng.mers] and [rand.predef].
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

BLOCK = 1 << 16
"""32-bit numbers drawn at a time."""

_WORDS, _LAG = 312, 156
_FEEDBACK = np.uint64(0xB5026F5AA96619E9)
_UPPER = np.uint64(0xFFFFFFFF80000000)
_LOWER = np.uint64(0x7FFFFFFF)
_SEEDING = 6364136223846793005
_MASK_64 = (1 << 64) - 1
_ROUNDS = 256
"""Number of state updates (312 words each) per array: 640 kB of numbers."""


def stream_32(seed: int) -> Iterator[npt.NDArray[np.uint32]]:
    """Endless output of ``std::mt19937(seed)``, in arrays of BLOCK numbers."""
    # numpy's legacy seeding equals the standard's, and a draw over all 32 bits returns the next number unchanged.
    random = np.random.RandomState(seed % (1 << 32))
    while True:
        yield random.randint(0, 1 << 32, BLOCK, dtype=np.uint32)


def stream_64(seed: int) -> Iterator[npt.NDArray[np.uint64]]:
    """Endless output of ``std::mt19937_64(seed)``, in arrays of any length."""
    words = [seed & _MASK_64]
    for place in range(1, _WORDS):
        words.append((_SEEDING * (words[-1] ^ (words[-1] >> 62)) + place) & _MASK_64)
    state = np.zeros((_ROUNDS + 1) * _WORDS, np.uint64)
    state[:_WORDS] = words
    while True:
        # Word n depends on the words n - 312, n - 311 and n - 156, so that 156 words can be computed at once.
        for start in range(0, _ROUNDS * _WORDS, _LAG):
            old, lagged = state[start : start + _LAG + 1], state[start + _LAG : start + 2 * _LAG]
            joined = (old[:-1] & _UPPER) | (old[1:] & _LOWER)
            state[start + _WORDS : start + _WORDS + _LAG] = (
                lagged ^ (joined >> np.uint64(1)) ^ ((joined & np.uint64(1)) * _FEEDBACK)
            )
        yield _temper(state[_WORDS:])
        state[:_WORDS] = state[-_WORDS:]


def _temper(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    found: npt.NDArray[np.uint64] = words ^ ((words >> np.uint64(29)) & np.uint64(0x5555555555555555))
    found ^= (found << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
    found ^= (found << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
    found ^= found >> np.uint64(43)
    return found


def shuffled_order(count: int, seed: int) -> npt.NDArray[np.int64]:
    """Permutation of ``count`` rows by the shuffle of Megatron-LM's build_mapping.

    Entry n is the former place of row n after ``for i = count - 1 .. 1: swap(row[i], row[rng() % (i + 1)])``, with
    ``rng`` = ``std::mt19937_64(seed)``: Durstenfeld's loop (doi:10.1145/364520.364540). Takes 8 bytes per row, and 8
    more during the shuffle.
    """
    order = np.arange(count)
    last_step = np.zeros(count, np.int64)
    numbers = _Numbers(stream_64(seed))
    place = count - 1
    while place > 0:
        # Among this many steps about eight collide in a place; all others can be done at once, in any order.
        steps = min(place, max(1, 4 * int(place**0.5)), BLOCK)
        _swap_each(order, last_step, place, numbers.take(steps))
        place -= steps
    return order


class _Numbers:
    """A random stream, read in arrays of any size."""

    def __init__(self, arrays: Iterator[npt.NDArray[np.uint64]]) -> None:
        self._arrays = arrays
        self._left = np.zeros(0, np.uint64)

    def take(self, count: int) -> npt.NDArray[np.uint64]:
        """Return the next ``count`` numbers."""
        while len(self._left) < count:
            self._left = np.concatenate([self._left, next(self._arrays)])
        taken, self._left = self._left[:count], self._left[count:]
        return taken


def _swap_each(
    order: npt.NDArray[np.int64],
    last_step: npt.NDArray[np.int64],
    first: int,
    numbers: npt.NDArray[np.uint64],
) -> None:
    """Do the shuffle's steps i = first, first - 1, ..., one per number.

    ``last_step`` is scratch of the length of ``order``, with arbitrary content.
    """
    steps = np.arange(len(numbers))
    places = first - steps
    others = (numbers % (places + 1).astype(np.uint64)).astype(np.int64)
    lowest = first - len(numbers) + 1
    # A step is independent if no other step has the same partner, and neither of its places belongs to another step.
    last_step[others] = steps
    overtaken = last_step[others] != steps
    meets = overtaken | (others >= lowest)
    meets[last_step[others[overtaken]]] = True
    inside = others[others >= lowest]
    meets[first - inside] = True
    alone = ~meets
    mine, theirs = places[alone], others[alone]
    order[mine], order[theirs] = order[theirs], order[mine]
    for place, other in zip(places[meets].tolist(), others[meets].tolist(), strict=True):
        order[place], order[other] = order[other], order[place]

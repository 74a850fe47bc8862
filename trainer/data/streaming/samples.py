"""Samples of one split, from text that is encoded on demand.

Pieces of text (trainer.data.streaming.text_pieces) come in the order of their epoch. A block is as many pieces as fill
the buffer. The documents of a block are shuffled, concatenated, and cut into windows of ``seq_length + 1`` tokens that
overlap by one, as in trainer.data.samples.gpt_dataset. The remainder begins the next block. A block depends only on its
place in the epoch, not on the processes that encode it. The place of the last block and the remainder before it are
therefore sufficient to resume from any sample, bit for bit.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.errors import DataError
from trainer.data.streaming.text_pieces import Cursor, Piece, Pieces
from trainer.data.streaming.work import Share
from trainer.data.streaming.workers import Encoder

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Boundary:
    """Start of a block.

    Attributes:
        cursor: first piece of the block.
        first: number of the first sample that ends in the block.
        carry: remaining tokens of the previous block, int32, at most ``seq_length``.
    """

    cursor: Cursor
    first: int
    carry: Tokens


@dataclass(frozen=True)
class _Block:
    """Tokens of a block's shuffled documents, and the place of the next block."""

    tokens: Tokens
    after: Cursor


class StreamedSamples:
    """An endless sequence of samples, read forward; reading backward encodes a block again.

    One thread may call ``sample`` while another calls ``state``. Memory: about four blocks of tokens, 4 bytes each.
    """

    def __init__(
        self,
        pieces: Pieces,
        share: Share,
        encoder: Encoder,
        *,
        seq_length: int,
        seed: int,
        buffer_bytes: int,
        kept: int,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Create the sequence; reads nothing yet.

        Args:
            pieces: the text.
            share: the documents of the split.
            encoder: encoder of the pieces; the caller closes it.
            seq_length: tokens of a sample, without the additional last token.
            seed: seed of the shuffle within a block.
            buffer_bytes: bytes of text per block.
            kept: number of samples before the last requested sample for which ``state`` must work.
            say: called with a line about the first skipped document.
        """
        self._pieces = pieces
        self._share = share
        self._encoder = encoder
        self._seq_length = seq_length
        self._seed = seed % (1 << 32)
        self._buffer_bytes = buffer_bytes
        self._kept = kept
        self._say: Callable[[str], None] | None = say
        self._lock = threading.Lock()
        self._boundaries = [Boundary(Cursor(), 0, np.zeros(0, np.int32))]
        # Samples in memory: from ``_first`` to before ``_after.first``.
        self._tokens: Tokens = np.zeros(0, np.int32)
        self._first = 0
        self._after: Boundary | None = None
        self._next: tuple[Cursor, Future[_Block]] | None = None
        # Iterator within an epoch, and its place: a new iterator would read a compressed file from its start again.
        self._reader: tuple[Cursor, Iterator[tuple[Piece, Cursor]]] | None = None

    def sample(self, number: int) -> npt.NDArray[np.int64]:
        """Return sample ``number``: a window of ``seq_length + 1`` tokens.

        Raises:
            DataError: the text cannot be read or encoded, or has no document of the split.
        """
        self._seek(number)
        start = (number - self._first) * self._seq_length
        return self._tokens[start : start + self._seq_length + 1].astype(np.int64)

    def state(self, number: int) -> dict[str, Any]:
        """Return plain values from which ``restore`` can resume at sample ``number``."""
        with self._lock:
            found = self._boundaries[self._place(number)]
        place = found.cursor
        return {
            "epoch": place.epoch,
            "place": place.place,
            "offset": place.offset,
            "first": found.first,
            "carry": found.carry.tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a state; samples from its place on need no earlier text.

        Raises:
            DataError: the state is damaged, or of another version.
        """
        try:
            cursor = Cursor(*(int(state[name]) for name in ("epoch", "place", "offset")))
            carry = np.asarray(state["carry"], np.int32)
            boundary = Boundary(cursor, int(state["first"]), carry)
            self._check(boundary)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f"data.streaming: the checkpoint's place in the text is damaged, or of another version ({error}); "
                "resume from another checkpoint, or with the version that wrote it"
            ) from None
        with self._lock:
            self._boundaries = [self._boundaries[0], boundary]
            self._after = None

    def _check(self, boundary: Boundary) -> None:
        """Raise ValueError for an impossible place."""
        place, carry = boundary.cursor, boundary.carry
        is_inside = 0 <= place.epoch < 1 << 32 and 0 <= place.place < self._pieces.units and place.offset >= 0
        if not (is_inside and boundary.first >= 0 and carry.ndim == 1 and len(carry) <= self._seq_length):
            raise ValueError(f"{place}, sample {boundary.first}")

    def close(self) -> None:
        """Stop another thread that waits for a sample; its wait ends with an error."""
        self._pieces.close()

    def _place(self, number: int) -> int:
        """Return the index of the last block in which sample ``number`` may end."""
        return bisect_right(self._boundaries, number, key=lambda boundary: boundary.first) - 1

    def _seek(self, number: int) -> None:
        if self._after is None or number < self._first:
            with self._lock:
                boundary = self._boundaries[self._place(number)]
            self._load(boundary)
        empty_since: int | None = None
        while self._after is not None and number >= self._after.first:
            here = self._after
            self._load(here)
            if len(self._tokens) > len(here.carry):
                empty_since = None
            elif empty_since is None:
                empty_since = here.cursor.epoch
            elif self._after.cursor.epoch > empty_since + 1:
                raise DataError("data.streaming: no document of the text belongs to this split; add text")
        self._forget(number)

    def _load(self, boundary: Boundary) -> None:
        block = self._block(boundary.cursor)
        self._tokens = np.concatenate([boundary.carry, block.tokens])
        self._first = boundary.first
        count = max(0, (len(self._tokens) - 1) // self._seq_length)
        left_over = self._tokens[count * self._seq_length :].copy()
        self._after = Boundary(block.after, boundary.first + count, left_over)
        with self._lock:
            last = self._boundaries[-1]
            if (last.first, last.cursor) != (boundary.first, boundary.cursor):
                # After reading backward: later boundaries are computed again.
                place = next(n for n, other in enumerate(self._boundaries) if other.cursor == boundary.cursor)
                del self._boundaries[place + 1 :]
            self._boundaries.append(self._after)
        following = self._encoder.ahead(partial(self._make, block.after))
        self._next = None if following is None else (block.after, following)

    def _forget(self, number: int) -> None:
        with self._lock:
            oldest = self._place(max(0, number - self._kept))
            # Boundary 0 is kept for readers that start from the beginning.
            del self._boundaries[1:oldest]

    def _block(self, cursor: Cursor) -> _Block:
        ahead, self._next = self._next, None
        # Never in this thread if the encoder has its own thread, which may be working for another split.
        future = ahead[1] if ahead and ahead[0] == cursor else self._encoder.ahead(partial(self._make, cursor))
        return self._make(cursor) if future is None else self._encoder.result(future)

    def _reader_at(self, cursor: Cursor) -> Iterator[tuple[Piece, Cursor]]:
        found, self._reader = self._reader, None
        return found[1] if found and found[0] == cursor else self._pieces.rest_of_epoch(cursor)

    def _make(self, cursor: Cursor) -> _Block:
        after = Cursor(cursor.epoch + 1)
        reader = self._reader_at(cursor)

        def pieces() -> Iterator[Piece]:
            nonlocal after
            size = 0
            for piece, following in reader:
                after = following
                yield piece
                size += piece.size
                if size >= self._buffer_bytes:
                    return

        found = list(self._encoder.encode(pieces(), self._share, lambda: self._pieces.reads))
        bad = next((part.first_bad for part in found if part.first_bad), None)
        if bad is not None and self._say is not None:
            self._say(f"skipped {bad.describe()}; further bad documents are skipped without a message")
            self._say = None
        tokens = np.concatenate([part.tokens for part in found]) if found else np.zeros(0, np.int32)
        lengths = np.concatenate([part.lengths for part in found]) if found else np.zeros(0, np.int64)
        key = (self._seed, cursor.epoch, cursor.place, cursor.offset % (1 << 32), cursor.offset >> 32)
        order = np.random.RandomState(key).permutation(len(lengths))
        shuffled = _in_order(tokens, lengths, order)
        if after.epoch == cursor.epoch:
            self._reader = after, reader
        return _Block(shuffled, after)


def _in_order(tokens: Tokens, lengths: npt.NDArray[np.int64], order: npt.NDArray[np.int64]) -> Tokens:
    """Return ``tokens`` with their documents, of ``lengths``, in the given order."""
    starts = np.cumsum(lengths) - lengths
    shuffled = np.empty_like(tokens)
    filled = 0
    for document in order.tolist():
        start, length = int(starts[document]), int(lengths[document])
        shuffled[filled : filled + length] = tokens[start : start + length]
        filled += length
    return shuffled

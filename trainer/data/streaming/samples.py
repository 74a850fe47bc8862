"""Samples of one split out of text that is encoded as it is needed.

Pieces of text (trainer.data.streaming.text_pieces) come in the order of their epoch. As many as fill the buffer make a
block; the documents of a block are shuffled, joined, and cut into windows of ``seq_length + 1`` tokens that overlap by
one, as trainer.data.samples.gpt_dataset does. What is left over begins the next block. A block follows from its place
in the epoch alone, however many processes encode it and whoever asks; so the place of the last block and what was left
over before it are all that it takes to go on from any sample, bit for bit.
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
    """Where a block begins.

    Attributes:
        cursor: its first piece.
        first: number of the first sample that ends in it.
        carry: tokens that were left over before it, int32, at most ``seq_length``.
    """

    cursor: Cursor
    first: int
    carry: Tokens


@dataclass(frozen=True)
class _Block:
    """The tokens of a block's shuffled documents, and the place where the next block begins."""

    tokens: Tokens
    after: Cursor


class StreamedSamples:
    """An endless sequence of samples, which is read forward; going back costs a block to be encoded again.

    One thread may ask for samples and another for the state. Memory: about four blocks of tokens, 4 bytes each.
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
        """Nothing is read yet.

        Args:
            pieces: the text.
            share: the documents of it that count.
            encoder: not ours to close.
            seq_length: tokens of a sample, but for the one after them.
            seed: of the shuffle within a block.
            buffer_bytes: text of a block.
            kept: how far behind the last sample asked for the state may still be asked for.
            say: takes a line about the first document that was passed over.
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
        # What is in memory: the samples from ``_first`` to before ``_after.first``.
        self._tokens: Tokens = np.zeros(0, np.int32)
        self._first = 0
        self._after: Boundary | None = None
        self._next: tuple[Cursor, Future[_Block]] | None = None
        # What reads on within an epoch, and where it stands: a compressed file would be read from its start again.
        self._reader: tuple[Cursor, Iterator[tuple[Piece, Cursor]]] | None = None

    def sample(self, number: int) -> npt.NDArray[np.int64]:
        """Sample ``number``: a window of ``seq_length + 1`` tokens.

        Raises:
            DataError: the text cannot be read or encoded, or no document of it belongs to the split.
        """
        self._seek(number)
        start = (number - self._first) * self._seq_length
        return self._tokens[start : start + self._seq_length + 1].astype(np.int64)

    def state(self, number: int) -> dict[str, Any]:
        """Plain values from which ``restore`` can go on at sample ``number``."""
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
        """Take over a state, so that samples from there on need nothing before it.

        Raises:
            DataError: it is damaged, or of another version.
        """
        try:
            cursor = Cursor(*(int(state[name]) for name in ("epoch", "place", "offset")))
            carry = np.asarray(state["carry"], np.int32)
            boundary = Boundary(cursor, int(state["first"]), carry)
            self._check(boundary)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f"data.streaming: the checkpoint's place in the text is damaged, or of another version ({error}); go "
                "on from another checkpoint, or with the version that wrote it"
            ) from None
        with self._lock:
            self._boundaries = [self._boundaries[0], boundary]
            self._after = None

    def _check(self, boundary: Boundary) -> None:
        """Raise ValueError if there is no such place."""
        place, carry = boundary.cursor, boundary.carry
        is_inside = 0 <= place.epoch < 1 << 32 and 0 <= place.place < self._pieces.units and place.offset >= 0
        if not (is_inside and boundary.first >= 0 and carry.ndim == 1 and len(carry) <= self._seq_length):
            raise ValueError(f"{place}, sample {boundary.first}")

    def close(self) -> None:
        """Let another thread that waits for a sample be told that none will come."""
        self._pieces.close()

    def _place(self, number: int) -> int:
        """Of the last block that sample ``number`` may end in."""
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
                raise DataError("data.streaming: no document of the text belongs to this split; give it more of it")
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
                # Gone back: what was known beyond comes again.
                place = next(n for n, one in enumerate(self._boundaries) if one.cursor == boundary.cursor)
                del self._boundaries[place + 1 :]
            self._boundaries.append(self._after)
        following = self._encoder.ahead(partial(self._make, block.after))
        self._next = None if following is None else (block.after, following)

    def _forget(self, number: int) -> None:
        with self._lock:
            oldest = self._place(max(0, number - self._kept))
            # The beginning is kept for those who start anew.
            del self._boundaries[1:oldest]

    def _block(self, cursor: Cursor) -> _Block:
        ahead, self._next = self._next, None
        # Never here while the encoder has a thread of its own: that may be at work for another split.
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
        bad = next((one.first_bad for one in found if one.first_bad), None)
        if bad is not None and self._say is not None:
            self._say(f"passed over {bad.told()}; more like it will be, without a word")
            self._say = None
        tokens = np.concatenate([one.tokens for one in found]) if found else np.zeros(0, np.int32)
        lengths = np.concatenate([one.lengths for one in found]) if found else np.zeros(0, np.int64)
        key = (self._seed, cursor.epoch, cursor.place, cursor.offset % (1 << 32), cursor.offset >> 32)
        order = np.random.RandomState(key).permutation(len(lengths))
        shuffled = _in_order(tokens, lengths, order)
        if after.epoch == cursor.epoch:
            self._reader = after, reader
        return _Block(shuffled, after)


def _in_order(tokens: Tokens, lengths: npt.NDArray[np.int64], order: npt.NDArray[np.int64]) -> Tokens:
    """``tokens`` with their documents, of ``lengths``, in another order."""
    starts = np.cumsum(lengths) - lengths
    shuffled = np.empty_like(tokens)
    filled = 0
    for document in order.tolist():
        start, length = int(starts[document]), int(lengths[document])
        shuffled[filled : filled + length] = tokens[start : start + length]
        filled += length
    return shuffled

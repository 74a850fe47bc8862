"""Which text is read when: files cut into pieces, which every epoch takes in an order of its own.

Plain files are cut by arithmetic on their sizes, so that nothing is read before it is needed: a piece holds the
documents that begin in its range, as a split of Hadoop's TextInputFormat does. A compressed file can be entered at its
start only; it is one unit, whose pieces follow each other.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from trainer.data.errors import DataError
from trainer.data.prepare.chunks import Span, TextDocument, rest_of_document
from trainer.data.prepare.inputs import InputFile, open_bytes, reading_errors, unreadable
from trainer.data.prepare.parquet import row_group_sizes

PIECE_BYTES = 256 << 10
"""Sixty-four of these in a block of 16 MiB come from as many places; opening a file for each costs next to nothing."""
_MOST_UNITS = 1 << 20
"""An epoch's order of so many takes 8 MB; larger inputs are cut into larger pieces."""
_LINE = 1 << 20


@dataclass(frozen=True)
class Piece:
    """Text that is read and encoded at a time.

    Attributes:
        spans: where it stands.
        size: bytes, as far as file sizes tell.
        file_size: of the files of ``spans``, all of them, when the run began.
        by_range: the only span is a range that need not begin or end with a document: those that begin in it are meant.
        content: the bytes of the only span, where they had to be decompressed to find it.
    """

    spans: tuple[Span, ...]
    size: int
    file_size: int
    by_range: bool = False
    content: bytes | None = None


@dataclass(frozen=True)
class Cursor:
    """A place between two pieces.

    Attributes:
        epoch: from 0.
        place: of the unit that is read next, in the epoch's order.
        offset: how many decompressed bytes of it have been read.
    """

    epoch: int = 0
    place: int = 0
    offset: int = 0


@dataclass(frozen=True)
class _Group:
    """Units that are told apart by a number.

    Attributes:
        files: small ones that make up one unit, or a large one.
        units: how many.
        sizes: of a Parquet file's row groups.
    """

    files: tuple[InputFile, ...]
    units: int = 1
    sizes: tuple[int, ...] = ()


class Pieces:
    """The pieces of some files, epoch after epoch. Memory: 8 bytes per unit, and one piece."""

    def __init__(
        self, files: Sequence[InputFile], text_document: TextDocument, seed: int, piece_bytes: int = PIECE_BYTES
    ) -> None:
        """Arrange ``files``; only Parquet files are opened.

        Args:
            files: in any order, which the order of the pieces depends on.
            text_document: what is a document in plain text.
            seed: of the order.
            piece_bytes: the least size of a piece, but for what is left over.

        Raises:
            DataError: a Parquet file cannot be read, or all files are empty.
        """
        self.files = tuple(files)
        self._text_document = text_document
        self._seed = seed % (1 << 32)
        self._size = max(piece_bytes, sum(file.size for file in files) // _MOST_UNITS)
        self._groups = list(_groups(files, text_document, self._size))
        self._ends = list(accumulate(group.units for group in self._groups))
        if not self._groups:
            raise DataError(f"{files[0].path}: is empty, and so is all other text" if files else "there is no text")
        self.units = self._ends[-1]
        self.reads = ""  # the compressed file that is read at the moment, or was last
        self._is_closed = False
        self._order: tuple[int, npt.NDArray[np.int64]] = (-1, np.zeros(0, np.int64))
        # By name, not by folder or time: copied to another place it is the same text.
        told = [[Path(file.path).name, file.size] for file in files]
        self.fingerprint = hashlib.blake2b(json.dumps([told, self._size]).encode(), digest_size=8).hexdigest()
        times = json.dumps([file.mtime_ns for file in files])
        self.times = hashlib.blake2b(times.encode(), digest_size=8).hexdigest()

    def close(self) -> None:
        """Let another thread that looks for a place in a compressed file, which may take minutes, leave off."""
        self._is_closed = True

    def rest_of_epoch(self, cursor: Cursor) -> Iterator[tuple[Piece, Cursor]]:
        """The pieces from ``cursor`` to the end of its epoch, each with the place after it.

        A compressed file is entered at its start: to go on within it costs what is before to be decompressed again, and
        nothing where the same iterator goes on.

        Raises:
            DataError: a file cannot be read.
        """
        order = self._order_of(cursor.epoch)
        for place in range(cursor.place, len(order)):
            following = Cursor(cursor.epoch, place + 1) if place + 1 < len(order) else Cursor(cursor.epoch + 1)
            offset = cursor.offset if place == cursor.place else 0
            for piece, read in self._unit(int(order[place]), offset):
                yield piece, following if read is None else Cursor(cursor.epoch, place, read)

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        # Several splits read the same pieces, each in an epoch and a thread of its own.
        known, order = self._order
        if known != epoch:
            order = np.random.RandomState([self._seed, epoch]).permutation(self.units)
            self._order = epoch, order
        return order

    def _unit(self, number: int, offset: int) -> Iterator[tuple[Piece, int | None]]:
        """The pieces of a unit from ``offset`` on; with each how much is read then, None where that is all."""
        place = bisect_right(self._ends, number)
        group = self._groups[place]
        within = number - (self._ends[place] - group.units)
        file = group.files[0]
        if group.sizes:
            yield Piece((Span(file.path, row_group=within),), group.sizes[within], file.size), None
        elif group.units > 1:
            start, stop = within * self._size, min(file.size, (within + 1) * self._size)
            yield Piece((Span(file.path, start, stop),), stop - start, file.size, by_range=True), None
        elif _is_stream(file, self._text_document):
            yield from self._stretches(file, offset)
        else:
            spans = tuple(Span(one.path) for one in group.files)
            size = sum(one.size for one in group.files)
            yield Piece(spans, size, size), None

    def _stretches(self, file: InputFile, offset: int) -> Iterator[tuple[Piece, int]]:
        errors = reading_errors()
        by_line = is_by_line(file, self._text_document) is True
        self.reads = file.path
        try:
            with open_bytes(file.path) as stream:
                left = offset
                while left > 0 and (skipped := len(stream.read(min(left, _LINE)))):
                    left -= skipped
                    if self._is_closed:
                        raise DataError("data.streaming: was closed")
                while content := stream.read(self._size):
                    content = b"".join((content, *rest_of_document(stream, by_line)))
                    stop = offset + len(content)
                    span = Span(file.path, offset, stop)
                    yield Piece((span,), len(content), file.size, content=content), stop
                    offset = stop
        except errors as error:
            raise unreadable(file.path, error) from None


def _groups(files: Sequence[InputFile], text_document: TextDocument, size: int) -> Iterator[_Group]:
    small: list[InputFile] = []
    for file in files:
        if file.size == 0:
            continue
        if file.kind == "parquet":
            if sizes := row_group_sizes(file.path):
                yield _Group((file,), len(sizes), tuple(sizes))
        elif _is_stream(file, text_document):
            yield _Group((file,))
        elif file.size > size and is_by_line(file, text_document) is not None:
            yield _Group((file,), -(-file.size // size))
        else:
            small.append(file)
            if sum(one.size for one in small) >= size or len(small) >= _MOST_SMALL:
                yield _Group(tuple(small))
                small = []
    if small:
        yield _Group(tuple(small))


_MOST_SMALL = 256


def _is_stream(file: InputFile, text_document: TextDocument) -> bool:
    return bool(file.packing) and is_by_line(file, text_document) is not None


def is_by_line(file: InputFile, text_document: TextDocument) -> bool | None:
    """Whether a document ends with its line, or else at a blank one; None: it is the whole file, or a table's row."""
    if file.kind == "parquet":
        return None
    if file.kind == "jsonl" or text_document == "line":
        return True
    return None if text_document == "file" else False


def aligned(span: Span, by_line: bool) -> Span:
    """``span``, its two ends moved on to the next border of documents; empty where that is the same one.

    Reads the lines across the ends. Where an end comes to lie does not depend on which span is asked about, so that
    spans which meet never share a document or lose one.
    """
    assert span.stop is not None
    with open_bytes(span.path) as stream:
        return Span(span.path, _border(stream, span.start, by_line), _border(stream, span.stop, by_line))


def _border(stream: BinaryIO, offset: int, by_line: bool) -> int:
    if offset == 0:
        return 0
    stream.seek(offset - 1)
    # Of a line that ends just before the offset this is its last byte, and the border of lines is the offset itself.
    return offset - 1 + sum(map(len, rest_of_document(stream, by_line)))

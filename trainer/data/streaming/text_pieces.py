"""Order of streamed text: pieces of files, in another order for every epoch.

Plain files are cut by arithmetic on their sizes, so that no file is read before it is needed: a piece holds the
documents that begin in its range, as a split of Hadoop's TextInputFormat does. A compressed file can be read only from
its start; it is one unit, whose pieces are consecutive.
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
from trainer.data.prepare.compression import open_bytes, reading_errors, unreadable
from trainer.data.prepare.inputs import InputFile
from trainer.data.prepare.parquet import row_group_sizes

PIECE_BYTES = 256 << 10
"""A block of 16 MiB has 64 pieces from as many places; opening a file for each costs almost nothing."""
_MOST_UNITS = 1 << 20
"""Maximum number of units, whose order takes 8 MB per epoch; larger inputs are cut into larger pieces."""
_LINE = 1 << 20


@dataclass(frozen=True)
class Piece:
    """Text that is read and encoded at a time.

    Attributes:
        spans: parts of files with the text.
        size: bytes, as far as known from file sizes.
        file_size: total size of the files of ``spans`` when the run began.
        by_range: the only span is a range of bytes, and means the documents that begin in this range.
        content: the bytes of the only span, if they had to be decompressed to find its end.
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
        epoch: epoch, from 0.
        place: index of the next unit in the epoch's order.
        offset: decompressed bytes of this unit that have been read.
    """

    epoch: int = 0
    place: int = 0
    offset: int = 0


@dataclass(frozen=True)
class _Group:
    """A run of consecutive unit numbers.

    Attributes:
        files: small files that are one unit together, or one large file.
        units: number of units.
        sizes: bytes of each row group of a Parquet file.
    """

    files: tuple[InputFile, ...]
    units: int = 1
    sizes: tuple[int, ...] = ()


class Pieces:
    """Pieces of some files, epoch after epoch.

    Memory: 8 bytes per unit, and one piece.
    """

    def __init__(
        self, files: Sequence[InputFile], text_document: TextDocument, seed: int, piece_bytes: int = PIECE_BYTES
    ) -> None:
        """Arrange ``files``; opens only Parquet files.

        Args:
            files: input files; the order of the pieces depends on their order.
            text_document: unit of plain text that makes a document.
            seed: seed of the order.
            piece_bytes: minimum size of a piece, except for remainders.

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
        self.reads = ""  # path of the compressed file that is or was last read
        self._is_closed = False
        self._order: tuple[int, npt.NDArray[np.int64]] = (-1, np.zeros(0, np.int64))
        # By name and size, not by folder or time: a copy elsewhere is the same text.
        described = [[Path(file.path).name, file.size] for file in files]
        self.fingerprint = hashlib.blake2b(json.dumps([described, self._size]).encode(), digest_size=8).hexdigest()
        times = json.dumps([file.mtime_ns for file in files])
        self.times = hashlib.blake2b(times.encode(), digest_size=8).hexdigest()

    def close(self) -> None:
        """Stop another thread's search in a compressed file, which may take minutes."""
        self._is_closed = True

    def rest_of_epoch(self, cursor: Cursor) -> Iterator[tuple[Piece, Cursor]]:
        """Yield the rest of an epoch from ``cursor``: pieces, each with the place after.

        A compressed file is read from its start: a new iterator within such a file decompresses all that comes before,
        while continuing the same iterator costs nothing.

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
        # Several splits read the same pieces, each in its own epoch and thread.
        known, order = self._order
        if known != epoch:
            order = np.random.RandomState([self._seed, epoch]).permutation(self.units)
            self._order = epoch, order
        return order

    def _unit(self, number: int, offset: int) -> Iterator[tuple[Piece, int | None]]:
        """Yield the pieces of a unit from ``offset`` on, each with the offset after it.

        The offset is None for the last piece.
        """
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
            yield from self._compressed_pieces(file, offset)
        else:
            spans = tuple(Span(member.path) for member in group.files)
            size = sum(member.size for member in group.files)
            yield Piece(spans, size, size), None

    def _compressed_pieces(self, file: InputFile, offset: int) -> Iterator[tuple[Piece, int]]:
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
            if sum(other.size for other in small) >= size or len(small) >= _MOST_SMALL:
                yield _Group(tuple(small))
                small = []
    if small:
        yield _Group(tuple(small))


_MOST_SMALL = 256


def _is_stream(file: InputFile, text_document: TextDocument) -> bool:
    return bool(file.packing) and is_by_line(file, text_document) is not None


def is_by_line(file: InputFile, text_document: TextDocument) -> bool | None:
    """True for documents of one line, False for paragraphs, None for other units.

    Other units are whole files and rows of tables.
    """
    if file.kind == "parquet":
        return None
    if file.kind == "jsonl" or text_document == "line":
        return True
    return None if text_document == "file" else False


def align(span: Span, by_line: bool) -> Span:
    """Return ``span`` with both ends moved to the next document boundary.

    The span is empty if both boundaries are the same.
    Reads the lines across the ends. The new place of an end does not depend on the span, so that adjacent spans never
    share or lose a document.
    """
    assert span.stop is not None
    with open_bytes(span.path) as stream:
        return Span(span.path, _boundary(stream, span.start, by_line), _boundary(stream, span.stop, by_line))


def _boundary(stream: BinaryIO, offset: int, by_line: bool) -> int:
    if offset == 0:
        return 0
    stream.seek(offset - 1)
    # If a line ends just before the offset, this byte is its line end, and the boundary is the offset itself.
    return offset - 1 + sum(map(len, rest_of_document(stream, by_line)))

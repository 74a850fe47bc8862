"""Cuts inputs into chunks of some megabytes that begin and end with documents.

The cuts follow from the files alone, so that any number of processes and nodes, now or after a kill, cut alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Literal

from trainer.data.errors import DataError
from trainer.data.prepare.inputs import InputFile, bytes_read, open_bytes, reading_errors, unreadable
from trainer.data.prepare.parquet import row_group_sizes

TextDocument = Literal["file", "paragraph", "line"]
"""What is a document in plain text: the whole file, what stands between blank lines, or a line."""
LARGEST_CHUNK = 16 << 20
SMALLEST_CHUNK = 1 << 20
_CHUNKS = 256
"""Smaller inputs are cut into about so many chunks, that all processes get some."""
_MOST_SPANS = 4096
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a file that begins and ends with documents.

    Attributes:
        path: the file.
        start: its first byte, once decompressed.
        stop: the byte after its last; None: the file's end.
        row_group: the first of a Parquet file that is meant, instead of bytes.
        row_groups: how many of them.
    """

    path: str
    start: int = 0
    stop: int | None = None
    row_group: int | None = None
    row_groups: int = 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one process does at a time.

    Attributes:
        number: 0, 1, ... in the order of the output.
        spans: where its text stands.
        input_bytes: its share of the files' sizes.
        content: the bytes of its only span, where these had to be decompressed to find it.
    """

    number: int
    spans: tuple[Span, ...]
    input_bytes: int
    content: bytes | None = None


def chunk_bytes(files: Sequence[InputFile]) -> int:
    """How much text a chunk holds, but for its last document: 1 to 16 MiB, more where there is more."""
    total = sum(file.size for file in files)
    return min(LARGEST_CHUNK, max(SMALLEST_CHUNK, total // _CHUNKS))


def cut_chunks(files: Sequence[InputFile], size: int, text_document: TextDocument) -> Iterator[Chunk]:
    """The chunks of ``files``, in order. Large compressed files are read as they are cut, all others barely touched.

    Args:
        files: the inputs.
        size: bytes of text per chunk.
        text_document: what is a document in plain text.

    Raises:
        DataError: a file cannot be read.
    """
    for number, (spans, input_bytes, content) in enumerate(_pieces(files, size, text_document)):
        yield Chunk(number, spans, input_bytes, content)


_Piece = tuple[tuple[Span, ...], int, "bytes | None"]


def _pieces(files: Sequence[InputFile], size: int, text_document: TextDocument) -> Iterator[_Piece]:
    small: list[Span] = []
    small_bytes = 0
    for file in files:
        is_whole = file.size <= size or (file.kind == "text" and text_document == "file")
        if is_whole and file.kind != "parquet":
            small.append(Span(file.path))
            small_bytes += file.size
            if small_bytes < size and len(small) < _MOST_SPANS:
                continue
        if small:
            yield tuple(small), small_bytes, None
            small, small_bytes = [], 0
        if is_whole and file.kind != "parquet":
            continue
        try:
            yield from _divide(file, size, by_line=file.kind == "jsonl" or text_document == "line")
        except reading_errors() as error:
            raise unreadable(file.path, error) from None
    if small:
        yield tuple(small), small_bytes, None


def _divide(file: InputFile, size: int, by_line: bool) -> Iterator[_Piece]:
    if file.kind == "parquet":
        yield from _divide_table(file.path, size)
    elif file.packing:
        yield from _divide_stream(file, size, by_line)
    else:
        yield from _divide_ranges(file, size, by_line)


def _divide_table(path: str, size: int) -> Iterator[_Piece]:
    first = read = 0
    sizes = row_group_sizes(path)
    for group, group_bytes in enumerate(sizes):
        read += group_bytes
        if read >= size or group == len(sizes) - 1:
            yield (Span(path, row_group=first, row_groups=group + 1 - first),), read, None
            first, read = group + 1, 0


def _divide_ranges(file: InputFile, size: int, by_line: bool) -> Iterator[_Piece]:
    start = 0
    with open_bytes(file.path) as stream:
        while start < file.size:
            stop = start + size
            if stop < file.size:
                stream.seek(stop)
                stop += sum(map(len, rest_of_document(stream, by_line)))
            stop = min(stop, file.size)
            yield (Span(file.path, start, stop),), stop - start, None
            start = stop


def _divide_stream(file: InputFile, size: int, by_line: bool) -> Iterator[_Piece]:
    start = read_before = 0
    with open_bytes(file.path) as stream:
        while content := stream.read(size):
            content = b"".join((content, *rest_of_document(stream, by_line)))
            stop, read = start + len(content), bytes_read(stream)
            yield (Span(file.path, start, stop),), read - read_before, content
            start, read_before = stop, read


def rest_of_document(stream: BinaryIO, by_line: bool) -> Iterator[bytes]:
    """What follows up to the next border of documents; the whole next one where ``stream`` stands at a border."""
    yield from _rest_of_line(stream)
    while not by_line:
        line = b"".join(_rest_of_line(stream))
        yield line
        if not line.strip():
            return


def _rest_of_line(stream: BinaryIO) -> Iterator[bytes]:
    while piece := stream.readline(_BLOCK):
        yield piece
        if piece.endswith(b"\n"):
            return


def line_number(path: str, offset: int, line: int) -> int:
    """Number in the whole file of the ``line``-th line (from 1) after byte ``offset``. Reads what is before."""
    with open_bytes(path) as stream:
        before = 0
        while offset > 0 and (block := stream.read(min(_BLOCK, offset))):
            before += block.count(b"\n")
            offset -= len(block)
    return before + line


def check_unchanged(files: Sequence[InputFile]) -> None:
    """Refuse files that were written to since they were found.

    Raises:
        DataError: names the first.
    """
    for file in files:
        try:
            status = os.stat(file.path)  # noqa: PTH116 (of a million files)
        except OSError as error:
            raise DataError(f"{file.path}: cannot be read any more: {error.strerror}") from None
        if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
            raise DataError(
                f"{file.path}: was written to while it was read; begin anew with --restart when nobody writes it"
            )

"""Cut inputs into text chunks of some megabytes, from document boundary to document boundary.

The cuts depend only on the files, so any number of processes and nodes, also after a kill, cuts at the same places.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Literal

from trainer.data.errors import DataError
from trainer.data.prepare.compression import bytes_read, open_bytes, reading_errors, unreadable
from trainer.data.prepare.inputs import InputFile
from trainer.data.prepare.parquet import row_group_sizes

TextDocument = Literal["file", "paragraph", "line"]
"""Unit of plain text that makes a document: the whole file, text between blank lines, or a line."""
LARGEST_CHUNK = 16 << 20
SMALLEST_CHUNK = 1 << 20
_CHUNKS = 256
"""Smaller inputs are cut into about so many chunks, so that every process gets some."""
_MOST_SPANS = 4096
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a file, from document boundary to document boundary.

    Attributes:
        path: the file.
        start: first byte after decompression.
        stop: byte after the last; None for the file's end.
        row_group: first row group of a Parquet file, instead of bytes.
        row_groups: number of row groups.
    """

    path: str
    start: int = 0
    stop: int | None = None
    row_group: int | None = None
    row_groups: int = 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Text that one process encodes at a time.

    Attributes:
        number: 0, 1, ... in the order of the output.
        spans: parts of files with the text.
        input_bytes: share of the files' sizes.
        content: bytes of the only span, if they had to be decompressed to find its end.
    """

    number: int
    spans: tuple[Span, ...]
    input_bytes: int
    content: bytes | None = None


def chunk_bytes(files: Sequence[InputFile]) -> int:
    """Return the target bytes of a text chunk: 1/256 of the input, 1 to 16 MiB."""
    total = sum(file.size for file in files)
    return min(LARGEST_CHUNK, max(SMALLEST_CHUNK, total // _CHUNKS))


def cut_chunks(files: Sequence[InputFile], size: int, text_document: TextDocument) -> Iterator[Chunk]:
    """Yield the chunks of ``files``, in order.

    Large compressed files are read in full, other files hardly at all.

    Args:
        files: the inputs.
        size: bytes of text per chunk.
        text_document: unit of plain text that makes a document.

    Raises:
        DataError: a file cannot be read.
    """
    for number, (spans, input_bytes, content) in enumerate(_cuts(files, size, text_document)):
        yield Chunk(number, spans, input_bytes, content)


_Cut = tuple[tuple[Span, ...], int, "bytes | None"]


def _cuts(files: Sequence[InputFile], size: int, text_document: TextDocument) -> Iterator[_Cut]:
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


def _divide(file: InputFile, size: int, by_line: bool) -> Iterator[_Cut]:
    if file.kind == "parquet":
        yield from _divide_table(file.path, size)
    elif file.packing:
        yield from _divide_stream(file, size, by_line)
    else:
        yield from _divide_ranges(file, size, by_line)


def _divide_table(path: str, size: int) -> Iterator[_Cut]:
    first = read = 0
    sizes = row_group_sizes(path)
    for group, group_bytes in enumerate(sizes):
        read += group_bytes
        if read >= size or group == len(sizes) - 1:
            yield (Span(path, row_group=first, row_groups=group + 1 - first),), read, None
            first, read = group + 1, 0


def _divide_ranges(file: InputFile, size: int, by_line: bool) -> Iterator[_Cut]:
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


def _divide_stream(file: InputFile, size: int, by_line: bool) -> Iterator[_Cut]:
    start = read_before = 0
    with open_bytes(file.path) as stream:
        while content := stream.read(size):
            content = b"".join((content, *rest_of_document(stream, by_line)))
            stop, read = start + len(content), bytes_read(stream)
            yield (Span(file.path, start, stop),), read - read_before, content
            start, read_before = stop, read


def rest_of_document(stream: BinaryIO, by_line: bool) -> Iterator[bytes]:
    """Yield text up to the next document boundary, or the whole next document."""
    yield from _rest_of_line(stream)
    while not by_line:
        line = b"".join(_rest_of_line(stream))
        yield line
        if not line.strip():
            return


def _rest_of_line(stream: BinaryIO) -> Iterator[bytes]:
    while part := stream.readline(_BLOCK):
        yield part
        if part.endswith(b"\n"):
            return


def line_number(path: str, offset: int, line: int) -> int:
    """Return the number in the file of line ``line`` (from 1) after byte ``offset``.

    Reads everything before this line.
    """
    with open_bytes(path) as stream:
        before = 0
        while offset > 0 and (block := stream.read(min(_BLOCK, offset))):
            before += block.count(b"\n")
            offset -= len(block)
    return before + line


def check_unchanged(files: Sequence[InputFile]) -> None:
    """Reject files that were modified since they were found.

    Raises:
        DataError: the error names the first such file.
    """
    for file in files:
        try:
            status = os.stat(file.path)  # noqa: PTH116 (of a million files)
        except OSError as error:
            raise DataError(f"{file.path}: cannot be read any more: {error.strerror}") from None
        if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
            raise DataError(
                f"{file.path}: was modified while it was read; start over with --restart when nothing writes to it"
            )

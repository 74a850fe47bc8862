"""Work of one process on one chunk: read, encode, write the part file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.config.formats.indexed_data import DTYPES
from trainer.data.errors import DataError
from trainer.data.indexed.index_format import dtype_code
from trainer.data.prepare.chunks import Chunk, Span, TextDocument, line_number
from trainer.data.prepare.documents import SpanReader, Text
from trainer.data.prepare.encoding import Block, Recipe, batches, encode_documents
from trainer.data.prepare.part_file import Footer, PartFileWriter
from trainer.data.tokenizers.tokenizer import Encoder

MAX_NAMED = 5
"""Number of bad documents that are named individually."""


@dataclass(frozen=True)
class ChunkWork:
    """Options of the work on a chunk, without the tokenizer and the chunk itself.

    Attributes:
        folder: folder of the part files.
        recipe: conversion of a document to sequences.
        text_document: unit of plain text that makes a document.
        skip_bad: skip and count bad documents.
    """

    folder: Path
    recipe: Recipe
    text_document: TextDocument
    skip_bad: bool


def part_file_path(folder: Path, number: int) -> Path:
    """Return the path of a chunk's part file."""
    return folder / f"{number:08d}.shard"


def token_dtype(vocab_size: int) -> np.dtype[np.int32] | np.dtype[np.uint16]:
    """Return the dtype of the .bin."""
    return np.dtype(DTYPES[dtype_code(vocab_size)])


def do_chunk(chunk: Chunk, work: ChunkWork, tokenizer: Encoder) -> Footer:
    """Write the part file of ``chunk``.

    Memory: some megabytes, and a few times the longest document.

    Raises:
        DataError: an input cannot be read, or holds a bad document.
        OSError: the part file cannot be written; ``filename`` of the error is the folder.
    """
    recipe = work.recipe
    dtype = token_dtype(tokenizer.vocab_size)
    try:
        with PartFileWriter(part_file_path(work.folder, chunk.number), dtype, len(recipe.keys)) as part_file:
            places: list[_Place] = []
            for batch in batches(_documents(chunk, work, part_file.footer, places)):
                for key, block in enumerate(_encode(batch, places, chunk, work, tokenizer, part_file.footer)):
                    part_file.add(key, block)
                places.clear()
                # Free the batch before reading on: the next document may be as long as this batch.
                batch.clear()
            part_file.finish()
            return part_file.footer
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(work.folder)) from None


_Place = tuple[int, "int | None"]
"""Number of a span, and line in the span."""


def _documents(chunk: Chunk, work: ChunkWork, footer: Footer, places: list[_Place]) -> Iterator[tuple[Text, ...]]:
    """Yield the documents of ``chunk``; appends the place of each to ``places``."""
    for place, span in enumerate(chunk.spans):
        reader = SpanReader(span, work.recipe.keys, work.text_document, chunk.content)
        for document in reader:
            if isinstance(document, tuple):
                footer.documents += 1
                places.append((place, reader.lines if reader.by_line else None))
                yield document
            else:
                _skip(chunk, work, footer, (place, document.line), document.problem)
        footer.lines.append(reader.lines)


def _skip(chunk: Chunk, work: ChunkWork, footer: Footer, where: _Place, problem: str) -> None:
    if not work.skip_bad:
        raise DataError(
            f"{place_of(chunk.spans[where[0]], where[1])}: {problem}; skip such documents with --on-error skip"
        )
    footer.bad += 1
    # Documents that the tokenizer rejects are found after the unreadable documents of the same batch.
    found = sorted([*footer.first_bad, (*where, problem)], key=lambda bad: (bad[0], bad[1] or 0))
    footer.first_bad[:] = found[:MAX_NAMED]


def _encode(
    batch: Sequence[tuple[Text, ...]],
    places: Sequence[_Place],
    chunk: Chunk,
    work: ChunkWork,
    tokenizer: Encoder,
    footer: Footer,
) -> list[Block]:
    """Return the tokens of ``batch`` under each key; skips documents that the tokenizer rejects."""

    def blocks(documents: Sequence[tuple[Text, ...]]) -> list[Block]:
        keys = range(len(work.recipe.keys))
        return [encode_documents([texts[key] for texts in documents], tokenizer, work.recipe) for key in keys]

    try:
        return blocks(batch)
    except DataError:
        good = []
        for document, where in zip(batch, places, strict=True):
            try:
                blocks([document])
                good.append(document)
            except DataError as error:
                _skip(chunk, work, footer, where, str(error))
        footer.documents -= len(batch) - len(good)
        return blocks(good) if good else []


def place_of(span: Span, line: int | None) -> str:
    """Return "file:line" for a line of ``span``; reads the file up to that line."""
    if line is None:
        return span.path
    try:
        return f"{span.path}:{line_number(span.path, span.start, line)}"
    except (OSError, DataError):
        return span.path

"""What a process does with one chunk: read, encode, write the shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.data.errors import DataError
from trainer.data.indexed.index_format import DTYPES, dtype_code
from trainer.data.prepare.chunks import Chunk, Span, TextDocument, line_number
from trainer.data.prepare.documents import SpanReader, Text
from trainer.data.prepare.encoding import Block, Recipe, batches, encode_documents
from trainer.data.prepare.part_file import Footer, ShardWriter
from trainer.data.tokenizers.tokenizer import Encoder

MOST_NAMED = 5
"""Bad documents that are named one by one."""


@dataclass(frozen=True)
class ChunkWork:
    """All that a process needs to know but the tokenizer and the chunk.

    Attributes:
        folder: of the shards.
        recipe: what is made of a document.
        text_document: what is a document in plain text.
        skip_bad: pass over what is no document, and count it.
    """

    folder: Path
    recipe: Recipe
    text_document: TextDocument
    skip_bad: bool


def shard_path(folder: Path, number: int) -> Path:
    """Where the shard of a chunk lies."""
    return folder / f"{number:08d}.shard"


def token_dtype(vocab_size: int) -> np.dtype[np.int32] | np.dtype[np.uint16]:
    """The dtype of the .bin."""
    return np.dtype(DTYPES[dtype_code(vocab_size)])


def do_chunk(chunk: Chunk, work: ChunkWork, tokenizer: Encoder) -> Footer:
    """Write the shard of ``chunk``. Memory: some megabytes, and a few times the longest document.

    Raises:
        DataError: an input cannot be read, or holds what is no document.
        OSError: the shard cannot be written; its ``filename`` is the folder.
    """
    recipe = work.recipe
    dtype = token_dtype(tokenizer.vocab_size)
    try:
        with ShardWriter(shard_path(work.folder, chunk.number), dtype, len(recipe.keys)) as shard:
            places: list[_Place] = []
            for batch in batches(_documents(chunk, work, shard.footer, places)):
                for key, block in enumerate(_encode(batch, places, chunk, work, tokenizer, shard.footer)):
                    shard.add(key, block)
                places.clear()
                # The next document may be as long as these.
                batch.clear()
            shard.finish()
            return shard.footer
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(work.folder)) from None


_Place = tuple[int, "int | None"]
"""Number of a span, and a line in it."""


def _documents(chunk: Chunk, work: ChunkWork, footer: Footer, places: list[_Place]) -> Iterator[tuple[Text, ...]]:
    """The documents of ``chunk``; where each was found is added to ``places``."""
    for place, span in enumerate(chunk.spans):
        reader = SpanReader(span, work.recipe.keys, work.text_document, chunk.content)
        for document in reader:
            if isinstance(document, tuple):
                footer.documents += 1
                places.append((place, reader.lines if reader.by_line else None))
                yield document
            else:
                _pass_over(chunk, work, footer, (place, document.line), document.problem)
        footer.lines.append(reader.lines)


def _pass_over(chunk: Chunk, work: ChunkWork, footer: Footer, where: _Place, problem: str) -> None:
    if not work.skip_bad:
        raise DataError(
            f"{place_of(chunk.spans[where[0]], where[1])}: {problem}; --on-error skip passes over such documents"
        )
    footer.bad += 1
    # What a tokenizer cannot encode is found after what cannot be read of the same batch.
    found = sorted([*footer.first_bad, (*where, problem)], key=lambda bad: (bad[0], bad[1] or 0))
    footer.first_bad[:] = found[:MOST_NAMED]


def _encode(
    batch: Sequence[tuple[Text, ...]],
    places: Sequence[_Place],
    chunk: Chunk,
    work: ChunkWork,
    tokenizer: Encoder,
    footer: Footer,
) -> list[Block]:
    """The tokens of ``batch`` under each key; documents that the tokenizer cannot encode are passed over."""

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
                _pass_over(chunk, work, footer, where, str(error))
        footer.documents -= len(batch) - len(good)
        return blocks(good) if good else []


def place_of(span: Span, line: int | None) -> str:
    """File and line number in it of a line of ``span``; reads the file up to there."""
    if line is None:
        return span.path
    try:
        return f"{span.path}:{line_number(span.path, span.start, line)}"
    except (OSError, DataError):
        return span.path

"""Work on a piece of text: read, keep the split's documents, encode."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.data.errors import DataError
from trainer.data.prepare.chunk_work import place_of
from trainer.data.prepare.chunks import Span, TextDocument
from trainer.data.prepare.documents import BadDocument, SpanReader, Text
from trainer.data.prepare.encoding import Block, Recipe, batches, encode_documents
from trainer.data.prepare.inputs import kind_of
from trainer.data.streaming.text_pieces import Piece, align
from trainer.data.tokenizers.tokenizer import Tokenizer

WHOLE = 1 << 64


@dataclass(frozen=True)
class Share:
    """The documents of a split: those with a hash from ``start`` to below ``stop``.

    Hashes are below 2^64.
    The hash is of the text, so that copies of a document are never in two splits, and a document stays in its split
    when files are added, renamed or cut otherwise.
    """

    start: int = 0
    stop: int = WHOLE

    def has(self, text: Text) -> bool:
        """True if a document belongs to the split."""
        if (self.start, self.stop) == (0, WHOLE):
            return True
        whole = text if isinstance(text, str) else "\n".join(text)
        digest = hashlib.blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return self.start <= int.from_bytes(digest, "little") < self.stop


def shares_of(shares: Sequence[float]) -> list[Share]:
    """Convert fractions that add up to 1 to ranges of hashes."""
    bounds, total = [0], 0.0
    for share in shares:
        total += share
        bounds.append(min(WHOLE, round(total * WHOLE)))
    # Rounding remainders belong to the last split that is not empty.
    last = max(place for place, share in enumerate(shares) if share) + 1
    bounds[last:] = [WHOLE] * (len(bounds) - last)
    return [Share(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]


@dataclass(frozen=True)
class Reading:
    """Options for finding documents in files.

    Attributes:
        key: key of JSON objects, or column of tables, with the text.
        text_document: unit of plain text that makes a document.
        skip_bad: skip bad documents.
    """

    key: str = "text"
    text_document: TextDocument = "file"
    skip_bad: bool = False


@dataclass(frozen=True)
class SkippedDocument:
    """A document that cannot be read, or that the tokenizer cannot encode.

    Attributes:
        span: span of the document.
        line: line in the span, from 1; None for inputs without lines.
        problem: the reason.
    """

    span: Span
    line: int | None
    problem: str

    def describe(self) -> str:
        """Return file, line and problem.

        Reads the file up to this line: call it for one document, not for each.
        """
        return f"{place_of(self.span, self.line)}: {self.problem}"


@dataclass(frozen=True, eq=False)
class Encoded:
    """Documents of a piece that belong to a split, each with its end-of-document token.

    Attributes:
        tokens: tokens of all documents, int32 [T].
        lengths: tokens of each document, none 0, int64 [D]; sums to T.
        first_bad: first skipped document; None without any.
    """

    tokens: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int64]
    first_bad: SkippedDocument | None = None


def encode_piece(piece: Piece, reading: Reading, share: Share, tokenizer: Tokenizer) -> Encoded:
    """Return the tokens of a piece.

    Raises:
        DataError: a file cannot be read, or holds a bad document.
    """
    bad: list[SkippedDocument] = []
    places: list[_Place] = []
    tokens: list[npt.NDArray[np.int32]] = [np.zeros(0, np.int32)]
    lengths: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
    for batch in batches((text,) for text in documents_of(piece, reading, share, bad, places)):
        block = _encode([text for (text,) in batch], places, tokenizer, reading, bad)
        places.clear()
        ends = np.concatenate([[0], np.cumsum(block.lengths)])[block.ends]
        of_documents = np.diff(ends, prepend=0)
        tokens.append(block.tokens)
        lengths.append(of_documents[of_documents > 0])
    return Encoded(np.concatenate(tokens), np.concatenate(lengths), bad[0] if bad else None)


_RECIPE = Recipe(append_eod=True)
_Place = tuple[Span, "int | None"]


def _encode(
    texts: Sequence[Text], places: Sequence[_Place], tokenizer: Tokenizer, reading: Reading, bad: list[SkippedDocument]
) -> Block:
    """Return the tokens of ``texts``, without texts that the tokenizer cannot encode."""
    try:
        return encode_documents(texts, tokenizer, _RECIPE)
    except DataError:
        good = []
        for text, (span, line) in zip(texts, places, strict=True):
            try:
                encode_documents([text], tokenizer, _RECIPE)
                good.append(text)
            except DataError as error:
                _skip(SkippedDocument(span, line, str(error)), reading, bad)
        return encode_documents(good, tokenizer, _RECIPE)


def _skip(document: SkippedDocument, reading: Reading, bad: list[SkippedDocument]) -> None:
    if not reading.skip_bad:
        raise DataError(f"{document.describe()}; to skip such documents set data.streaming_on_error: skip")
    bad.append(document)


def documents_of(
    piece: Piece, reading: Reading, share: Share, bad: list[SkippedDocument], places: list[_Place] | None = None
) -> Iterator[Text]:
    """Yield the documents of a piece that belong to a split.

    Args:
        piece: the text.
        reading: options for finding documents.
        share: the documents of the split.
        bad: skipped documents are appended.
        places: the span and line of each document are appended.

    Raises:
        DataError: a file cannot be read, or holds a bad document.
    """
    for span in _spans(piece, reading):
        reader = SpanReader(span, (reading.key,), reading.text_document, piece.content)
        try:
            for document in reader:
                if isinstance(document, BadDocument):
                    _skip(SkippedDocument(span, document.line, _with_config_key(document.problem)), reading, bad)
                elif share.has(document[0]):
                    if places is not None:
                        places.append((span, reader.lines if reader.by_line else None))
                    yield document[0]
        except DataError as error:
            raise DataError(_with_config_key(str(error))) from None


def _with_config_key(problem: str) -> str:
    """Replace the flag of ``preprocess`` in a message by its config key."""
    return problem.replace("--json-keys", "data.streaming_key")


def _spans(piece: Piece, reading: Reading) -> Iterator[Span]:
    _check_sizes(piece)
    if not piece.by_range:
        yield from piece.spans
        return
    (span,) = piece.spans
    try:
        found = align(span, kind_of(span.path) == "jsonl" or reading.text_document == "line")
    except OSError as error:
        raise DataError(f"{span.path}: cannot be read: {error.strerror}") from None
    assert found.stop is not None
    if found.stop > piece.file_size:
        # The file has grown, and so has its last document.
        raise DataError(_changed(piece))
    if found.start < found.stop:
        yield found


def _check_sizes(piece: Piece) -> None:
    """Reject files whose size has changed since they were cut.

    Each replica would read something else.

    Raises:
        DataError: a file is shorter, longer by more than appended lines or paragraphs, or missing.
    """
    try:
        found = sum(Path(path).stat().st_size for path in {span.path for span in piece.spans})
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from None
    if found < piece.file_size or (found > piece.file_size and not piece.by_range):
        raise DataError(_changed(piece))


def _changed(piece: Piece) -> str:
    others = len(piece.spans) - 1
    also = f" or one of the {others:,} small files that are read with it" if others else ""
    return (
        f"{piece.spans[0].path}{also} has another size than when the run began; restore it, and do not modify files "
        "of data.data_path while a run reads them"
    )

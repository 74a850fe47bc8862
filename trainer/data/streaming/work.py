"""What a process does with a piece of text: read its documents, keep those of a split, encode them."""

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
from trainer.data.streaming.text_pieces import Piece, aligned
from trainer.data.tokenizers.tokenizer import Tokenizer

WHOLE = 1 << 64


@dataclass(frozen=True)
class Share:
    """The documents of a split: those whose hash, a number below 2^64, is at least ``start`` and below ``stop``.

    The hash is of the text, so that copies of a document, wherever they stand, are never on both sides of a split, and
    a document keeps its side when files are added, renamed or cut otherwise.
    """

    start: int = 0
    stop: int = WHOLE

    def has(self, text: Text) -> bool:
        """Whether a document belongs to the split."""
        if (self.start, self.stop) == (0, WHOLE):
            return True
        whole = text if isinstance(text, str) else "\n".join(text)
        digest = hashlib.blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return self.start <= int.from_bytes(digest, "little") < self.stop


def shares_of(shares: Sequence[float]) -> list[Share]:
    """Shares that add up to 1, as parts of all hashes."""
    bounds, total = [0], 0.0
    for share in shares:
        total += share
        bounds.append(min(WHOLE, round(total * WHOLE)))
    # What rounding left over belongs to the last split that is not empty.
    last = max(place for place, share in enumerate(shares) if share) + 1
    bounds[last:] = [WHOLE] * (len(bounds) - last)
    return [Share(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]


@dataclass(frozen=True)
class Reading:
    """How documents are found in files.

    Attributes:
        key: of JSON objects, or column of tables, that holds the text.
        text_document: what is a document in plain text.
        skip_bad: pass over what is no document.
    """

    key: str = "text"
    text_document: TextDocument = "file"
    skip_bad: bool = False


@dataclass(frozen=True)
class PassedOver:
    """What is no document, or none that the tokenizer can encode.

    Attributes:
        span: that it stands in.
        line: of the span, from 1; None where lines mean nothing.
        problem: what is wrong with it.
    """

    span: Span
    line: int | None
    problem: str

    def told(self) -> str:
        """File, line and problem. Reads the file up to there: for the first one, not for each."""
        return f"{place_of(self.span, self.line)}: {self.problem}"


@dataclass(frozen=True, eq=False)
class Encoded:
    """The documents of a piece that belong to a split, each with its end-of-document token.

    Attributes:
        tokens: of all of them, int32 [T].
        lengths: of each, none 0, int64 [D]; sums to T.
        first_bad: the first that was passed over; None: there is none.
    """

    tokens: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int64]
    first_bad: PassedOver | None = None


def encode_piece(piece: Piece, reading: Reading, share: Share, tokenizer: Tokenizer) -> Encoded:
    """The tokens of a piece.

    Raises:
        DataError: a file cannot be read, or holds what is no document.
    """
    bad: list[PassedOver] = []
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
    texts: Sequence[Text], places: Sequence[_Place], tokenizer: Tokenizer, reading: Reading, bad: list[PassedOver]
) -> Block:
    """The tokens of ``texts``, without those that the tokenizer cannot encode."""
    try:
        return encode_documents(texts, tokenizer, _RECIPE)
    except DataError:
        good = []
        for text, (span, line) in zip(texts, places, strict=True):
            try:
                encode_documents([text], tokenizer, _RECIPE)
                good.append(text)
            except DataError as error:
                _pass_over(PassedOver(span, line, str(error)), reading, bad)
        return encode_documents(good, tokenizer, _RECIPE)


def _pass_over(document: PassedOver, reading: Reading, bad: list[PassedOver]) -> None:
    if not reading.skip_bad:
        raise DataError(f"{document.told()}; data.streaming_on_error: skip passes over such documents")
    bad.append(document)


def documents_of(
    piece: Piece, reading: Reading, share: Share, bad: list[PassedOver], places: list[_Place] | None = None
) -> Iterator[Text]:
    """The documents of a piece that belong to a split.

    Args:
        piece: the text.
        reading: how documents are found in it.
        share: of the split.
        bad: what was passed over is added.
        places: the span of each document, and a line of it, is added.

    Raises:
        DataError: a file cannot be read, or holds what is no document.
    """
    for span in _spans(piece, reading):
        reader = SpanReader(span, (reading.key,), reading.text_document, piece.content)
        try:
            for document in reader:
                if isinstance(document, BadDocument):
                    _pass_over(PassedOver(span, document.line, _in_our_words(document.problem)), reading, bad)
                elif share.has(document[0]):
                    if places is not None:
                        places.append((span, reader.lines if reader.by_line else None))
                    yield document[0]
        except DataError as error:
            raise DataError(_in_our_words(str(error))) from None


def _in_our_words(problem: str) -> str:
    """What is said of the flags of ``preprocess``, of the keys that stand for them here."""
    return problem.replace("--json-keys", "data.streaming_key")


def _spans(piece: Piece, reading: Reading) -> Iterator[Span]:
    _check_sizes(piece)
    if not piece.by_range:
        yield from piece.spans
        return
    (span,) = piece.spans
    try:
        found = aligned(span, kind_of(span.path) == "jsonl" or reading.text_document == "line")
    except OSError as error:
        raise DataError(f"{span.path}: cannot be read: {error.strerror}") from None
    assert found.stop is not None
    if found.stop > piece.file_size:
        # It has grown, and its last document with it.
        raise DataError(_changed(piece))
    if found.start < found.stop:
        yield found


def _check_sizes(piece: Piece) -> None:
    """Refuse files that are no longer what they were when they were cut: each replica would read something else.

    Raises:
        DataError: they are shorter or longer, and not lines or paragraphs that came behind the others; or one is gone.
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
        f"{piece.spans[0].path}{also} has another size than when the run began; bring it back, and let no file of "
        "data.data_path change while a run reads it"
    )

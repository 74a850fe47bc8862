"""Training text for vocabularies, from the same kinds of files as data preparation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice

from trainer.data.errors import DataError
from trainer.data.prepare.chunk_work import place_of
from trainer.data.prepare.chunks import Chunk, Span, cut_chunks
from trainer.data.prepare.documents import BadDocument, SpanReader, Text
from trainer.data.prepare.inputs import InputFile, bytes_read, open_bytes, reading_errors
from trainer.data.prepare.parquet import row_counts, row_group_sizes
from trainer.data.tokenizers.vocabulary import without_surrogates

PIECE = 1 << 20
"""Bytes read, and characters passed on, at a time; more in memory only for longer lines."""
_LEAST_PIECE = 1 << 16
_PIECES = 4096
"""Approximate number of places that a sample comes from, if the text is large enough."""
_PROBES = 16
"""Number of compressed files and tables whose beginnings are read to estimate the text in all of them."""
_PROBED_ROWS = 256
_PROBED_BYTES = 8 << 20
"""Decompressed bytes: many times the read-ahead of a decompressor."""


@dataclass(frozen=True)
class Corpus:
    """Training text: all text of the files, or an evenly spread sample.

    Attributes:
        files: input files.
        json_keys: keys of JSON objects, or columns.
        most_bytes: approximate limit of the text to learn from; None for all.
    """

    files: tuple[InputFile, ...]
    json_keys: tuple[str, ...]
    most_bytes: int | None = None

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @cached_property
    def text_bytes(self) -> int:
        """Approximate bytes of text in all files.

        Plain files count by size; the text of others is estimated from the beginnings of some.

        Raises:
            DataError: a table cannot be read, or the package that reads a kind of file is not installed.
        """
        others = [file for file in self.files if file.packing or file.kind == "parquet"]
        probed = others[:: -(-len(others) // _PROBES) or 1]
        other_bytes, probed_bytes = (sum(file.size for file in files) for files in (others, probed))
        text = sum(file.size * self._text_per_byte(file) for file in probed)
        return self.size - other_bytes + round(other_bytes * text / max(1, probed_bytes))

    @property
    def wanted(self) -> int:
        """Approximate bytes of text to learn from."""
        return self.text_bytes if self.most_bytes is None else min(self.most_bytes, self.text_bytes)

    def texts(self, advance: Callable[[int, int], None] | None = None) -> Iterator[str]:
        """Yield the texts under any of the keys, in a fixed order.

        A plain file is divided into texts of whole lines.
        Skipped parts of an uncompressed file are not read, except rows of a table between chosen rows.

        Args:
            advance: called with additional bytes of the files, and the number of texts in these bytes.

        Raises:
            DataError: a file is not UTF-8, or a line is not a JSON object with those keys; names file and line.
        """
        for chunk, texts in self._chosen():
            number = 0
            for number, text in enumerate(texts, 1):  # noqa: B007 (number is the count of texts)
                yield text
            if advance is not None:
                advance(chunk.input_bytes, number)

    def _chosen(self) -> Iterator[tuple[Chunk, Iterator[str]]]:
        """Yield every chunk, and the texts chosen from it."""
        total, wanted = self.text_bytes, self.wanted
        size = min(PIECE, max(_LEAST_PIECE, wanted // _PIECES)) if wanted < total else PIECE
        seen = taken = 0
        for chunk in cut_chunks(self.files, size, "line"):
            # The chosen share of the text read so far is that of the whole, to within a piece.
            found = chunk.input_bytes if chunk.content is None else len(chunk.content)
            texts: Iterator[str] = iter(())
            if wanted < total and chunk.spans[0].row_group is not None:
                pieces = -(-found // size)
                due = min(pieces, max(0, (wanted * (seen + found - 1) // total - taken) // size + 1))
                if due:
                    rows = _Rows.of(chunk.spans[0], pieces, due)
                    taken += found * rows.taken // max(1, rows.count)
                    texts = self._some_rows(chunk.spans[0], rows)
            elif taken * total <= wanted * seen:
                taken += found
                texts = chain.from_iterable(self._texts(span, chunk.content) for span in chunk.spans)
            yield chunk, texts
            seen += found

    def _texts(self, span: Span, content: bytes | None) -> Iterator[str]:
        for document in SpanReader(span, self.json_keys, "file", content):
            yield from _checked(document, span)

    def _some_rows(self, span: Span, rows: _Rows) -> Iterator[str]:
        for row, document in enumerate(islice(SpanReader(span, self.json_keys), rows.stop)):
            if rows.has(row):
                yield from _checked(document, span)

    def _text_per_byte(self, file: InputFile) -> float:
        """Return the bytes of text per byte on disk."""
        if file.kind == "parquet":
            sizes, counts = row_group_sizes(file.path), row_counts(file.path)
            if not sizes or not counts[0]:
                return 1.0
            read = min(_PROBED_ROWS, counts[0])
            documents = islice(SpanReader(Span(file.path, row_group=0), self.json_keys), read)
            whole = [document for document in documents if not isinstance(document, BadDocument)]
            text = sum(len(text.encode()) for document in whole for text in _unique_texts(document))
            return text * counts[0] / (read * max(1, sizes[0]))
        try:
            with open_bytes(file.path) as stream:
                content = stream.read(_PROBED_BYTES)
                return len(content) / max(1, bytes_read(stream))
        except reading_errors():
            return 1.0  # reading reports the error later


@dataclass(frozen=True)
class _Rows:
    """Rows chosen from a table: ``due`` runs of ``length`` rows, spread evenly."""

    count: int
    due: int
    length: int

    @classmethod
    def of(cls, span: Span, pieces: int, due: int) -> _Rows:
        """Divide the rows of ``span`` into ``pieces`` equal runs, and choose ``due`` of them."""
        first = span.row_group or 0
        count = sum(row_counts(span.path)[first : first + span.row_groups])
        return cls(count, due, -(-count // pieces))

    @property
    def taken(self) -> int:
        return min(self.count, self.due * self.length)

    @property
    def stop(self) -> int:
        """End of the last run; later rows need not be read."""
        return min(self.count, -(-(self.due - 1) * self.count // self.due) + self.length)

    def has(self, row: int) -> bool:
        # Distance from the start of the preceding run, times the number of runs.
        return row * self.due % max(1, self.count) < self.due * self.length


def _checked(document: tuple[Text, ...] | BadDocument, span: Span) -> Iterator[str]:
    if isinstance(document, BadDocument):
        raise DataError(f"{place_of(span, document.line)}: {document.problem}")
    yield from _unique_texts(document)


def _unique_texts(document: tuple[Text, ...]) -> Iterator[str]:
    # A plain file has the same text under every key; learn from it once.
    yield from dict.fromkeys(without_surrogates(text if isinstance(text, str) else " ".join(text)) for text in document)


def pieces_at_line_ends(text: str, size: int = PIECE) -> Iterator[str]:
    """Yield ``text`` in pieces of about ``size`` characters, cut at line ends if possible."""
    start = 0
    while start < len(text):
        stop = text.rfind("\n", start, start + size) + 1 if start + size < len(text) else len(text)
        stop = stop if stop > start else start + size
        yield text[start:stop]
        start = stop

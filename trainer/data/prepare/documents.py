"""Iterate over the documents of a span."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from trainer.data.prepare.chunks import Span, TextDocument
from trainer.data.prepare.compression import open_bytes, reading_errors, unreadable
from trainer.data.prepare.inputs import check_is_text, kind_of
from trainer.data.prepare.parquet import read_rows

Text = str | list[str]
"""Text of a document, or its list of sentences."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ON_A_LINE = "write each document on its own line"
_KEYS_NAMED = 5
_LONGEST_KEY = 40


@dataclass(frozen=True)
class BadDocument:
    """A document that cannot be read.

    Attributes:
        line: line at which the document begins, from 1 in its span; None for inputs without lines.
        problem: the reason.
    """

    line: int | None
    problem: str


class SpanReader:
    """Iterator over the documents of a span: one text per key, or a BadDocument.

    Memory: one document.

    Args:
        span: the part of a file.
        keys: keys of JSON objects, or columns; plain text is the same under each key.
        text_document: unit of plain text that makes a document.
        content: the span's bytes, if they are already in memory.
    """

    def __init__(
        self, span: Span, keys: Sequence[str], text_document: TextDocument = "file", content: bytes | None = None
    ) -> None:
        self.lines = 0
        """Lines read so far."""
        self._span = span
        self._keys = tuple(keys)
        self._text_document = text_document
        self._content = content
        self._left = None if span.stop is None else span.stop - span.start

    @property
    def by_line(self) -> bool:
        """True if a document is one line, the last line read."""
        if self._span.row_group is not None:
            return False
        return kind_of(self._span.path) == "jsonl" or self._text_document == "line"

    def __iter__(self) -> Iterator[tuple[Text, ...] | BadDocument]:
        """Yield every document, in order.

        Raises:
            DataError: the file cannot be read.
        """
        span = self._span
        if span.row_group is not None:
            groups = range(span.row_group, span.row_group + span.row_groups)
            for row, values in read_rows(span.path, groups, self._keys):
                # A missing text becomes an empty document, so that the columns of a row stay aligned.
                texts = {key: "" if text is None else text for key, text in zip(self._keys, values, strict=True)}
                yield self._checked(texts, None, f"row {row:,}")
            return
        try:
            with io.BytesIO(self._content) if self._content is not None else open_bytes(span.path) as stream:
                if self._content is None and span.start:
                    stream.seek(span.start)
                if kind_of(span.path) == "jsonl":
                    yield from self._json_lines(stream)
                else:
                    yield from self._texts(stream)
        except reading_errors() as error:
            raise unreadable(span.path, error) from None

    def _stream_lines(self, stream: BinaryIO) -> Iterator[bytes]:
        # Not a generator: a generator would hold the line, perhaps a document of gigabytes, while it is encoded.
        return iter(lambda: self._next_line(stream), b"")

    def _next_line(self, stream: BinaryIO) -> bytes:
        """Return the next line of the span; b"" at its end."""
        if self._left is not None and self._left <= 0:
            return b""
        line = stream.readline()
        if self._left is not None:
            self._left -= len(line)
        self.lines += bool(line)
        if self.lines > 1 or self._span.start:
            return line
        # A broken line of JSON is one bad document, whatever bytes it holds.
        check_is_text(self._span.path, line if kind_of(self._span.path) == "text" else line[:4])
        return line.removeprefix(_BYTE_ORDER_MARK)

    def _json_lines(self, stream: BinaryIO) -> Iterator[tuple[Text, ...] | BadDocument]:
        loads = json.loads
        for line in self._stream_lines(stream):
            try:
                values = loads(line.decode())
            except UnicodeDecodeError as error:
                yield BadDocument(self.lines, f"is not UTF-8 text: {_utf8_problem(error)}")
            except json.JSONDecodeError as error:
                if not line.isspace():
                    yield BadDocument(self.lines, _json_problem(line, error))
            except ValueError:  # a number of more digits than Python reads
                yield BadDocument(self.lines, "is not a readable line of JSON: a number has too many digits")
            except RecursionError:
                yield BadDocument(self.lines, "is not a readable line of JSON: it is nested too deeply")
            else:
                document = self._checked(values, self.lines, "the line")
                # Hold a long document only once while it is encoded.
                del line, values
                yield document
                del document

    def _checked(self, values: Any, line: int | None, place: str) -> tuple[Text, ...] | BadDocument:
        if not isinstance(values, dict):
            remedy = f"; {_ON_A_LINE}, for example with `jq -c '.[]'` for a list" if isinstance(values, list) else ""
            like = f"{{{json.dumps(self._keys[0])}: ...}}"
            return BadDocument(line, f"{place} is not a JSON object with texts, such as {like}{remedy}")
        found: tuple[Any, ...] = tuple(values.get(key) for key in self._keys)
        for key, text in zip(self._keys, found, strict=True):
            if not isinstance(text, str) and not (
                isinstance(text, list) and all(isinstance(sentence, str) for sentence in text)
            ):
                found_instead = _kind_of(text) if key in values else _keys_of(values)
                if key not in values and isinstance(values.get(key.partition(".")[0]), dict):
                    found_instead += f"; extract a nested text with `jq -c '{{text: .{key}}}'`"
                return BadDocument(
                    line, f"{place} has no text under the key {key!r} of --json-keys, but {found_instead}"
                )
        return found

    def _texts(self, stream: BinaryIO) -> Iterator[tuple[Text, ...] | BadDocument]:
        number = len(self._keys)
        for line, content in self._text_documents(stream):
            try:
                text = content.decode()
            except UnicodeDecodeError as error:
                yield BadDocument(line, f"is not UTF-8 text: {_utf8_problem(error)}")
                continue
            # Hold a long document only once while it is encoded.
            del content
            yield (text,) * number
            del text

    def _whole(self, stream: BinaryIO) -> bytes:
        """Return the whole span, which may be a part of the file."""
        content = stream.read(-1 if self._left is None else self._left)
        self.lines = content.count(b"\n") + (content[-1:] not in (b"", b"\n"))
        if self._span.start:
            return content
        check_is_text(self._span.path, content)
        return content.removeprefix(_BYTE_ORDER_MARK)

    def _text_documents(self, stream: BinaryIO) -> Iterator[tuple[int | None, bytes]]:
        if self._text_document == "file":
            yield 1, self._whole(stream)
            return
        paragraph: list[bytes] = []
        for line in self._stream_lines(stream):
            if self._text_document == "line":
                if line.strip():
                    yield self.lines, line.rstrip(b"\r\n")
            elif line.strip():
                paragraph.append(line)
            elif paragraph:
                yield self.lines - len(paragraph), b"".join(paragraph).rstrip(b"\r\n")
                paragraph = []
        if paragraph:
            yield self.lines - len(paragraph) + 1, b"".join(paragraph).rstrip(b"\r\n")


def _kind_of(value: Any) -> str:
    """Describe a value that stands in place of a text, in JSON's words."""
    if isinstance(value, list):
        other = next((item for item in value if not isinstance(item, str)), "")
        return f"a list with {'a list' if isinstance(other, list) else _kind_of(other)}"
    names = {type(None): "null", bool: "true or false", dict: "an object", bytes: "bytes"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else f"a {type(value).__name__}")


def _keys_of(values: dict[str, Any]) -> str:
    """Describe the keys of an object, naming at most the first few."""
    if not values:
        return "the object has no keys"
    named = ", ".join(repr(key[:_LONGEST_KEY]) for key in [*values][:_KEYS_NAMED])
    return f"has only {named}{', ...' if len(values) > _KEYS_NAMED else ''}"


def _json_problem(line: bytes, error: json.JSONDecodeError) -> str:
    if not line.strip(b"\0 \t\r\n"):
        return "is not a line of JSON: it holds only NUL bytes, like a file that was not written completely"
    remedy = ""
    if b"\r" in line.strip() and error.msg == "Extra data":
        remedy = "; end lines with LF or CR LF, not with CR alone"
    elif len(line.strip()) == 1:  # the beginning of an object or list that continues on the next line
        remedy = f"; {_ON_A_LINE}, for example with `jq -c`"
    elif error.msg == "Extra data":
        remedy = f"; {_ON_A_LINE}"
    return f"is not a line of JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1:,}{remedy}"


def _utf8_problem(error: UnicodeDecodeError) -> str:
    at = f"byte 0x{error.object[error.start]:02x} at position {error.start + 1:,}"
    others = "or -f CP932, EUC-JP, CP949, GB18030"
    return f"{at} ({error.reason}); convert other encodings, for example with iconv -f LATIN1 -t UTF-8 ({others})"

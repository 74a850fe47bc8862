"""Texts as they come in: plain files, one document each, and JSON lines, one document per line; .gz of either."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from trainer.data.errors import DataError

BATCH_BYTES = 1 << 20
"""Text handed to a tokenizer at a time: enough to keep its threads busy, and all that is held in memory."""


def read_documents(paths: Sequence[Path], json_keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Every document of ``paths``, in order: one text per key of ``json_keys``.

    A plain file has the same single text under every key. Memory: one document.

    Raises:
        DataError: a file cannot be read as UTF-8, or a line is no JSON object with those keys; names file and line.
    """
    for path in paths:
        try:
            with _open_text(path) as file:
                if _is_json_lines(path):
                    yield from _read_json_lines(path, file, json_keys)
                else:
                    text = file.read()
                    yield (text,) * len(json_keys)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
        except (UnicodeDecodeError, EOFError) as error:
            raise DataError(f"{path}: is not UTF-8 text: {error}") from None


def batches_by_size(texts: Iterable[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    """``texts`` in lists of about BATCH_BYTES characters."""
    batch: list[tuple[str, ...]] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += sum(map(len, text))
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def pieces_at_line_ends(text: str, size: int = BATCH_BYTES) -> Iterator[str]:
    """``text`` in pieces of about ``size`` characters, cut after a line end where there is one."""
    start = 0
    while start < len(text):
        stop = text.rfind("\n", start, start + size) + 1 if start + size < len(text) else len(text)
        stop = stop if stop > start else start + size
        yield text[start:stop]
        start = stop


def _is_json_lines(path: Path) -> bool:
    suffixes = path.suffixes[:-1] if path.suffix == ".gz" else path.suffixes
    return bool(suffixes) and suffixes[-1] in (".jsonl", ".json", ".ndjson")


def _open_text(path: Path) -> TextIO:
    # newline="" keeps "\r\n": what goes in must come out again.
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _read_json_lines(path: Path, file: TextIO, keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: is not a line of JSON: {error}") from None
        found = values if isinstance(values, dict) else {}
        missing = next((key for key in keys if not isinstance(found.get(key), str)), None)
        if missing is not None:
            raise DataError(
                f"{path}:{number}: has no text under {missing!r}; name the keys that hold text with --json-keys"
            )
        yield tuple(found[key] for key in keys)

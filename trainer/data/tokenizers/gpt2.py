"""GPT-2's two files: vocab.json (piece -> id), and merges.txt.

A line of merges.txt is one merge, in the order of training.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from trainer.data.errors import DataError
from trainer.data.tokenizers.byte_level import missing_bytes
from trainer.data.tokenizers.huggingface import byte_level_content, check_distinct
from trainer.data.tokenizers.special_names import NAMES

_HEADER = "#version"
_SPECIAL = re.compile(r"<.*>|\[.*\]|madeupword\d+")
"""Pieces that need no merge: names of special and reserved tokens."""
_MOST_UNMADE = 0.01
"""Allowed share of other pieces without a merge, such as reserved names."""


def read_gpt2(vocab_file: Path, merge_file: Path) -> dict[str, Any]:
    """Return the content of a tokenizer.json equivalent to the two files.

    Raises:
        DataError: a file cannot be read, ids are missing or duplicate, a byte has no token, a merge produces a token
            that is not in the vocabulary, or merges are missing.
    """
    vocabulary = _read_vocabulary(vocab_file)
    merges = _read_merges(merge_file, vocabulary, vocab_file)
    _check_all_made(vocabulary, merges, merge_file, vocab_file)
    content = byte_level_content(vocabulary, merges)
    # A piece that a merge produces is an ordinary piece, even if it looks like a special token.
    names = {name for role in NAMES.values() for name in role} & vocabulary.keys()
    names -= {left + right for left, right in merges}
    content["added_tokens"] = [
        added_token(name, vocabulary[name]) for name in sorted(names, key=vocabulary.__getitem__)
    ]
    return content


def _check_all_made(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], merge_file: Path, vocab_file: Path
) -> None:
    made = {left + right for left, right in merges}
    unmade = sum(len(piece) > 1 and piece not in made and not _SPECIAL.fullmatch(piece) for piece in vocabulary)
    if unmade > _MOST_UNMADE * len(vocabulary):
        raise DataError(
            f"{merge_file}: does not make {unmade:,} of the {len(vocabulary):,} tokens of {vocab_file}; it is "
            "truncated, or belongs to another vocabulary: get it again"
        )


def added_token(name: str, token: int) -> dict[str, Any]:
    """Return a special token in the format of a tokenizer.json."""
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": name, "special": True, **off}


def _read_vocabulary(path: Path) -> dict[str, int]:
    try:
        vocabulary = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; name GPT-2's vocab.json") from None
    except ValueError as error:
        raise DataError(f"{path}: is not JSON: {error}; name GPT-2's vocab.json") from None
    if not isinstance(vocabulary, dict) or not all(type(token) is int for token in vocabulary.values()):
        raise DataError(f"{path}: is not an object of tokens and their ids; name GPT-2's vocab.json")
    check_distinct(vocabulary, str(path))
    hole = next((token for token, known in enumerate(sorted(vocabulary.values())) if token != known), None)
    if hole is not None:
        raise DataError(f"{path}: has {len(vocabulary)} tokens, but none with id {hole}; it is damaged or truncated")
    absent = missing_bytes(vocabulary)
    if absent:
        raise DataError(f"{path}: has no token for {absent} of the 256 bytes; it is not a byte-level vocabulary")
    return vocabulary


def _read_merges(path: Path, vocabulary: dict[str, int], vocab_file: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; name GPT-2's merges.txt") from None
    except ValueError as error:
        raise DataError(f"{path}: is not UTF-8 text: {error}; name GPT-2's merges.txt") from None
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (number == 1 and line.startswith(_HEADER)):
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2:
            raise DataError(f"{path}:{number}: is not a pair of tokens separated by a space: {line[:60]!r}")
        unknown = next((piece for piece in (*pair, "".join(pair)) if piece not in vocabulary), None)
        if unknown is not None:
            raise DataError(f"{path}:{number}: merges to or from {unknown!r}, which {vocab_file} does not contain")
        merges.append((pair[0], pair[1]))
    return merges

"""BERT's vocab.txt: one piece per line; the line number, from 0, is the id.

Splitting and normalisation as in Devlin et al. 2018 (arXiv:1810.04805) and in transformers' BertTokenizer: control
characters are removed, each Chinese character is a word, and lower-casing also removes accents.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.data.errors import DataError
from trainer.data.tokenizers.gpt2 import added_token

CONTINUATION = "##"
LONGEST_WORD = 100
"""Characters; a longer word becomes [UNK]."""
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def read_wordpiece(vocab_file: Path, lower_case: bool) -> dict[str, Any]:
    """Return the content of a tokenizer.json equivalent to ``vocab_file``.

    Raises:
        DataError: the file cannot be read, a line is empty or duplicate, or [UNK] is missing.
    """
    try:
        lines = vocab_file.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DataError(f"{vocab_file}: cannot be read: {error.strerror}; name BERT's vocab.txt") from None
    except ValueError as error:
        raise DataError(f"{vocab_file}: is not UTF-8 text: {error}; name BERT's vocab.txt") from None
    if lines[-1] == "":
        lines.pop()
    vocabulary: dict[str, int] = {}
    for number, line in enumerate(lines):
        piece = line.rstrip("\r")
        if not piece:
            raise DataError(f"{vocab_file}:{number + 1}: is empty, so that id {number} has no token; get it again")
        if piece in vocabulary:
            raise DataError(
                f"{vocab_file}:{number + 1}: {piece!r} is already in line {vocabulary[piece] + 1}; every token needs "
                "a unique id"
            )
        vocabulary[piece] = number
    if "[UNK]" not in vocabulary:
        raise DataError(f"{vocab_file}: has no [UNK], the token for unknown text; name BERT's vocab.txt")
    return wordpiece_content(vocabulary, lower_case)


def wordpiece_content(vocabulary: dict[str, int], lower_case: bool) -> dict[str, Any]:
    """Return the tokenizer.json of a BERT vocabulary."""
    return {
        "version": "1.0",
        "added_tokens": [added_token(name, vocabulary[name]) for name in SPECIAL if name in vocabulary],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": lower_case,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": CONTINUATION, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": CONTINUATION,
            "max_input_chars_per_word": LONGEST_WORD,
            "vocab": vocabulary,
        },
    }

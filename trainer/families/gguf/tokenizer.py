"""Tokenizer files from the vocabulary of a GGUF file: tokenizer.json for byte-level BPE, a .model for SentencePiece.

Keys: github.com/ggml-org/ggml/blob/master/docs/gguf.md, "Tokenizer". The splitting of a text into words is not in the
file, only its name (``tokenizer.ggml.pre``); rules by name: github.com/ggml-org/llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)
"""Types of a token, as in SentencePiece."""
_GPT_2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_LETTERS = {**_GPT_2, "use_regex": False}
_DIGITS = {"type": "Digits", "individual_digits": True}


def _words(digits: str) -> dict[str, Any]:
    """Rule of cl100k with runs of ``digits``."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+"
    )
    return _sequence(
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, _LETTERS
    )


def _sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


@dataclass(frozen=True)
class _Rule:
    """Attributes: the splitting into words; NFC first; a word that is a token is not merged; a text begins with bos."""

    words: dict[str, Any]
    normalises: bool = False
    takes_whole_words: bool = False
    adds_bos: bool = False


_RULES = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo"), _Rule(_GPT_2)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _Rule(_sequence(_DIGITS, _GPT_2))),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3"), _Rule(_words(r"\p{N}{1,3}"), takes_whole_words=True, adds_bos=True)
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Rule(_words(r"\p{N}"), normalises=True)),
}


@dataclass(frozen=True)
class TokenizerFiles:
    """Files to write beside the weights.

    Attributes:
        files: content by name.
        notes: one sentence on each file that cannot be made.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def tokenizer_files(metadata: Mapping[str, Any], vocab_size: int) -> TokenizerFiles:
    """The tokenizer of a GGUF file.

    Args:
        metadata: keys and values of the file.
        vocab_size: rows of the word table.
    """
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens", [])
    problem = tokenizer_problem(metadata, vocab_size)
    if problem:
        return TokenizerFiles(notes=(f"{problem}; no tokenizer is written, name its file with data.tokenizer_model",))
    names = {
        f"{role}_token": tokens[metadata[f"tokenizer.ggml.{name}_token_id"]]
        for name, role in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad"))
        if metadata.get(f"tokenizer.ggml.{name}_token_id", vocab_size) < vocab_size
    }
    settings: dict[str, Any] = {**names, "clean_up_tokenization_spaces": False}
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    if kind == "gpt2":
        content = {"tokenizer.json": _as_json(_byte_level(metadata, names.get("bos_token")))}
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    else:
        content = {"tokenizer.model": _sentencepiece(metadata)}
        settings["tokenizer_class"] = "LlamaTokenizer"
        settings["add_bos_token"] = metadata.get("tokenizer.ggml.add_bos_token", True)
    return TokenizerFiles({**content, "tokenizer_config.json": _as_json(settings)})


def tokenizer_problem(metadata: Mapping[str, Any], vocab_size: int) -> str | None:
    """Obstacle to files of the tokenizer, as the start of a sentence; None: they can be made. See tokenizer_files."""
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens", [])
    pre = metadata.get("tokenizer.ggml.pre")
    if not tokens or kind not in ("gpt2", "llama"):
        return f"tokenizer.ggml.model is {kind!r}, and only gpt2 and llama can be written as a file"
    if len(tokens) != vocab_size:
        return f"the tokenizer has {len(tokens)} tokens, but the word table {vocab_size} rows"
    if kind == "gpt2" and pre not in _RULES:
        return f"tokenizer.ggml.pre {pre!r} names a splitting of words that is unknown here"
    if kind == "gpt2" and "tokenizer.ggml.merges" not in metadata:
        return "the tokenizer has no tokenizer.ggml.merges"
    return None


def _byte_level(metadata: Mapping[str, Any], bos: str | None) -> dict[str, Any]:
    """Content of tokenizer.json (github.com/huggingface/tokenizers)."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], _kinds(metadata)
    rule = _RULES[metadata["tokenizer.ggml.pre"]]
    around: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    # GGUF files of some families leave the flag out and mean the family's own habit.
    if metadata.get("tokenizer.ggml.add_bos_token", rule.adds_bos) and bos is not None:
        first = {"SpecialToken": {"id": bos, "type_id": 0}}
        text = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
        around = {
            "type": "TemplateProcessing",
            "single": [first, text[0]],
            "pair": [first, text[0], first, text[1]],
            "special_tokens": {bos: {"id": bos, "ids": [tokens.index(bos)], "tokens": [bos]}},
        }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                **{"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False},
                **{"normalized": False, "special": kind in (UNKNOWN, CONTROL)},
            }
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if rule.normalises else None,
        "pre_tokenizer": rule.words,
        "post_processor": around,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            **{"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None},
            **{"fuse_unk": False, "byte_fallback": False, "ignore_merges": rule.takes_whole_words},
            "vocab": {token: number for number, token in enumerate(tokens) if kinds[number] != UNUSED},
            "merges": [merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def _kinds(metadata: Mapping[str, Any]) -> list[int]:
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(metadata["tokenizer.ggml.tokens"])
    return kinds


def _as_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def _sentencepiece(metadata: Mapping[str, Any]) -> bytes:
    """A SentencePiece BPE model: field numbers from github.com/google/sentencepiece, src/sentencepiece_model.proto."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], _kinds(metadata)
    scores = metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    pieces = b"".join(
        _field(1, _field(1, token.encode()) + b"\x15" + struct.pack("<f", score) + _field(3, kind))
        for token, score, kind in zip(tokens, scores, kinds, strict=True)
    )
    has_bytes = any(kind == _BYTE for kind in kinds)
    return pieces + _field(2, b"".join(_trainer(metadata, has_bytes))) + _field(3, b"".join(_normalizer(metadata)))


_BYTE = 6
_BPE = 2


def _trainer(metadata: Mapping[str, Any], has_bytes: bool) -> Iterator[bytes]:
    yield _field(3, _BPE)
    yield _field(35, int(has_bytes))
    tokens = metadata["tokenizer.ggml.tokens"]
    for number, name in ((40, "unknown"), (41, "bos"), (42, "eos"), (43, "padding")):
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        # An absent token has the id -1, which the format writes as 64 bits.
        yield _field(number, (1 << 64) - 1 if token is None else token)
        if token is not None:
            yield _field(number + 5, tokens[token].encode())


def _normalizer(metadata: Mapping[str, Any]) -> Iterator[bytes]:
    yield _field(1, b"identity")
    yield _field(3, int(metadata.get("tokenizer.ggml.add_space_prefix", True)))
    yield _field(4, int(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)))
    yield _field(5, 1)


def _field(number: int, value: int | bytes) -> bytes:
    """A field of a protocol-buffers message: a varint, or bytes with their length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    coded = bytearray()
    while value > 0x7F:
        coded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*coded, value])

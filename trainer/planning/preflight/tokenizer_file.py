"""Tokens of the tokenizer that a config names, from its files. Torch-free; nothing is decoded.

trainer.data.tokenizers.factory recognises the files by the same rule.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.families.format.errors import FamilyError
from trainer.families.gguf.header import MAGIC, read_header

if TYPE_CHECKING:
    from trainer.config.sections.data import DataConfig
    from trainer.planning.start_model import Files

_REMEDY = "name a tokenizer.json or its folder"
_START = 100
"""Bytes that tell the kind of a file."""
_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "spiece.model", "vocab.txt", "tekken.json")
"""Files in a folder that list the tokens; the first counts."""
_FILES_OF_TYPE = {
    "HuggingFaceTokenizer": ("tokenizer.json",),
    "GPT2BPETokenizer": ("vocab.json",),
    "BertWordPieceLowerCase": ("vocab.txt",),
    "BertWordPieceCase": ("vocab.txt",),
    "TikTokenizer": ("tekken.json",),
    **dict.fromkeys(
        ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"), ("tokenizer.model", "spiece.model")
    ),
}


class TokenizerError(ValueError):
    """A file that is not a tokenizer: one sentence with the file, the problem and the remedy."""


def named_size(data: DataConfig, files: Files) -> int | None:
    """Token ids of the tokenizer that a config names, with those that the config adds; None: unknown.

    Raises:
        TokenizerError: the file is empty, damaged or of another kind.
    """
    tokens = named_tokens(data, files)
    if tokens is None:
        return None
    extra = [f"<extra_id_{number}>" for number in range(data.vocab_extra_ids)] + data.tokenizer_special_tokens
    return tokens.size + len({*extra} - tokens.names)


def named_tokens(data: DataConfig, files: Files) -> Tokens | None:
    """Tokens in the files of the tokenizer that a config names; None: the files do not say.

    Raises:
        TokenizerError: the file is empty, damaged or of another kind.
    """
    named = data.tokenizer_model or data.vocab_file
    if named is None or data.tokenizer_type == "NullTokenizer":
        return None
    inside = set(files.names(named))
    if not inside:
        return _tokens(named, files)
    wanted = _FILES_OF_TYPE.get(data.tokenizer_type or "", _FILES)
    name = next((name for name in wanted if name in inside), None)
    return None if name is None else _tokens(f"{named}/{name}", files)


@dataclass(frozen=True)
class Tokens:
    """Tokens of a tokenizer.

    Attributes:
        file: path of the file that lists them.
        size: one more than the largest id.
        names: their names, as far as the file gives them.
        is_whole: True if no file beside this one adds tokens.
    """

    file: str
    size: int
    names: frozenset[str] = frozenset()
    is_whole: bool = False


def _tokens(file: str, files: Files) -> Tokens | None:
    start = files.read(file, 0, _START)
    if start is None:
        return None
    if not start:
        raise TokenizerError(f"{file}: is empty; {_REMEDY}")
    if start[: len(MAGIC)] == MAGIC:
        return _tokens_of_gguf(file, files)
    if start[:1] != b"[" and (start.lstrip()[:1] == b"{" or file.endswith(".json")):
        return _tokens_of_json(file, files.read(file) or b"")
    if file.endswith(".tiktoken") or start.partition(b"\n")[0].strip().endswith(b" 0"):
        return Tokens(file, len((files.read(file) or b"").split()) // 2)
    if file.endswith(".txt"):
        try:
            lines = (files.read(file) or b"").decode().splitlines()
        except ValueError as error:
            raise TokenizerError(f"{file}: is not UTF-8 text: {error}; name BERT's vocab.txt") from None
        return Tokens(file, len(lines), frozenset(lines), is_whole=True)
    return _tokens_of_pieces(file, files.read(file) or b"") if ".model" in file else None


def _tokens_of_gguf(file: str, files: Files) -> Tokens | None:
    try:
        listed = read_header(file, lambda offset, limit: files.read(file, offset, limit) or b"").metadata
        names = frozenset(listed["tokenizer.ggml.tokens"])
        return Tokens(file, len(listed["tokenizer.ggml.tokens"]), names)
    except FamilyError as error:
        raise TokenizerError(str(error)) from None
    except (KeyError, TypeError):
        return None


def _tokens_of_json(file: str, text: bytes) -> Tokens:
    """Tokens of a tokenizer.json, a tekken.json, or the vocab.json of GPT-2."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{file}: is not a valid tokenizer.json: {error}; {_REMEDY}") from None
    try:
        # In the vocab.json of GPT-2, model and config are tokens.
        has_model = isinstance(values.get("model"), dict)
        if has_model:
            vocabulary = values["model"]["vocab"]
            pairs = {str(piece[0]): number for number, piece in enumerate(vocabulary)}
            ids = dict(vocabulary) if isinstance(vocabulary, dict) else pairs
            ids.update({added["content"]: added["id"] for added in values.get("added_tokens") or ()})
        elif isinstance(values.get("config"), dict) and "default_vocab_size" in values["config"]:
            return Tokens(file, int(values["config"]["default_vocab_size"]))
        else:
            ids = values
        return Tokens(file, 1 + max(ids.values()), frozenset(ids), is_whole=has_model)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise TokenizerError(f"{file}: is not a valid tokenizer.json: it has no model; {_REMEDY}") from None


def _tokens_of_pieces(file: str, data: bytes) -> Tokens:
    try:
        pieces = list(_pieces(data))
    except (ValueError, IndexError):
        raise TokenizerError(f"{file}: is cut or damaged; name a SentencePiece .model") from None
    if not pieces:
        raise TokenizerError(f"{file}: is not a SentencePiece model; {_REMEDY}")
    return Tokens(file, len(pieces), frozenset(pieces), is_whole=True)


def _pieces(data: bytes) -> Iterator[str]:
    """Names in a SentencePiece model: field 1 of the protocol buffer repeats, and its field 1 is the piece."""
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        if tag & 7 != 2:
            return
        length, place = _varint(data, place)
        if tag >> 3 != 1:
            return
        if place + length > len(data):
            raise ValueError("the file ends within a piece")
        size, start = _varint(data, place + 1)
        yield data[start : start + size].decode()
        place += length


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place

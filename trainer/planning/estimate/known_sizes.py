"""Size of the vocabulary and of the data, by the files that a config names. Torch-free; nothing is decoded.

The trainer decides by the same rule (trainer.data.samples.sources.vocabulary); here a file that cannot be read gives
no size.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainer.config.train_config import TrainConfig
from trainer.families.format.errors import FamilyError
from trainer.families.gguf.header import MAGIC, read_header
from trainer.planning.start_model import Files

GENERATED_TOKENS = 256
"""Of generated data without model.vocab_size; trainer.data.samples.mock has the same number."""
_INDEX_HEADER = struct.Struct("<9sQBQQ")
_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
"""Megatron-LM's dtype code of an index -> bytes of a token (megatron/core/datasets/indexed_dataset.py)."""


@dataclass(frozen=True)
class DatasetSize:
    """Size of a run's indexed data.

    Attributes:
        tokens: of all datasets that the run trains on, before they are divided; None: unknown.
        vocabulary: largest vocabulary of their manifests; None without manifests.
    """

    tokens: int | None
    vocabulary: int | None


def dataset_size(config: TrainConfig, files: Files) -> DatasetSize:
    """Tokens and vocabulary of the indexed datasets that a run trains on."""
    if config.data.streaming or config.data.mock_data:
        return DatasetSize(None, None)
    prefixes = [prefix for key, prefix in config.data_prefixes() if key in ("data.data_path", "data.train_data_path")]
    manifests = [_manifest(files, prefix) for prefix in prefixes]
    counts = [
        manifest.get("tokens") if manifest else _indexed_tokens(files, prefix)
        for prefix, manifest in zip(prefixes, manifests, strict=True)
    ]
    known = [count for count in counts if isinstance(count, int)]
    sizes = [size for manifest in manifests if isinstance(size := manifest.get("vocab_size"), int)]
    return DatasetSize(sum(known) if known and len(known) == len(counts) else None, max(sizes, default=None))


def vocabulary_of(config: TrainConfig, data: DatasetSize, files: Files) -> int | None:
    """Token ids of the run, without padding; None: no file says the number.

    Args:
        config: of the run.
        data: size of its datasets.
        files: of the machine that has them.
    """
    by_numbers = config.data.tokenizer_type == "NullTokenizer"
    if config.model.vocab_size is not None:
        return config.model.vocab_size + by_numbers
    if config.data.mock_data:
        return GENERATED_TOKENS
    sizes = [size for size in (data.vocabulary, tokenizer_size(config, files)) if size is not None]
    return max(sizes, default=None)


def tokenizer_size(config: TrainConfig, files: Files) -> int | None:
    """Token ids of the tokenizer that a config names, with those that the config adds; None: unknown."""
    data = config.data
    named = data.tokenizer_model or data.vocab_file
    if named is None:
        return None
    try:
        tokens = next(_tokens(named, files), None)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, FamilyError):
        return None
    if tokens is None:
        return None
    extra = [f"<extra_id_{number}>" for number in range(data.vocab_extra_ids)] + data.tokenizer_special_tokens
    return tokens.size + len({*extra} - tokens.names)


@dataclass(frozen=True)
class _Tokens:
    size: int
    names: frozenset[str] = frozenset()


def _tokens(named: str, files: Files) -> Iterator[_Tokens]:
    """Tokens of the first file that has them, of a folder or a file."""
    names = set(files.names(named))
    for name in ("tokenizer.json", "vocab.json", "tokenizer.model", "spiece.model", "vocab.txt", "tekken.json"):
        if name in names:
            yield from _tokens(f"{named}/{name}", files)
    if names or (data := files.read(named)) is None:
        return
    if data[:4] == MAGIC:
        listed = read_header(named, lambda offset, limit: data[offset : offset + limit]).metadata
        yield _Tokens(len(listed["tokenizer.ggml.tokens"]), frozenset(listed["tokenizer.ggml.tokens"]))
    elif data[:1] == b"{":
        yield _tokens_of_json(json.loads(data))
    elif named.endswith(".tiktoken"):
        yield _Tokens(len(data.split()) // 2)
    elif named.endswith(".txt"):
        lines = data.decode().splitlines()
        yield _Tokens(len(lines), frozenset(lines))
    elif ".model" in named:
        pieces = list(_pieces(data))
        yield _Tokens(len(pieces), frozenset(pieces))


def _tokens_of_json(values: dict[str, Any]) -> _Tokens:
    """Tokens of a tokenizer.json, a tekken.json, or the vocab.json of GPT-2."""
    if "model" in values:
        vocabulary = values["model"]["vocab"]
        pairs = {str(piece[0]): number for number, piece in enumerate(vocabulary)}
        ids = dict(vocabulary) if isinstance(vocabulary, dict) else pairs
        ids.update({added["content"]: added["id"] for added in values.get("added_tokens") or ()})
    elif "config" in values and "default_vocab_size" in values["config"]:
        return _Tokens(int(values["config"]["default_vocab_size"]))
    else:
        ids = values
    return _Tokens(1 + max(ids.values()), frozenset(ids))


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


def _manifest(files: Files, prefix: str) -> dict[str, Any]:
    """The manifest of a dataset that ``llmctl data prepare`` wrote; empty for others."""
    try:
        values = json.loads(files.read(f"{prefix}.json") or b"{}")
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _indexed_tokens(files: Files, prefix: str) -> int | None:
    """Tokens of a dataset without a manifest, by its index: its last sequence ends the .bin."""
    head = files.read(f"{prefix}.idx", 0, _INDEX_HEADER.size) or b""
    if len(head) < _INDEX_HEADER.size:
        return None
    magic, _, code, sequences, _ = _INDEX_HEADER.unpack(head)
    if magic != _INDEX_MAGIC or code not in _TOKEN_BYTES or not sequences:
        return None
    last_length = files.read(f"{prefix}.idx", _INDEX_HEADER.size + 4 * (sequences - 1), 4) or b""
    last_offset = files.read(f"{prefix}.idx", _INDEX_HEADER.size + 4 * sequences + 8 * (sequences - 1), 8) or b""
    if len(last_length) < 4 or len(last_offset) < 8:
        return None
    return int.from_bytes(last_offset, "little") // _TOKEN_BYTES[code] + int.from_bytes(last_length, "little")

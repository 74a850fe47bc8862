"""Parser of a SentencePiece .model, a protocol-buffers message, without the library.

Field numbers are from sentencepiece_model.proto (github.com/google/sentencepiece, src/); the wire format is documented
at protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trainer.data.errors import DataError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of a piece."""
UNIGRAM, BPE = 1, 2
"""Types of a model; 3 is whole words, and 4 is single characters."""
_SPECIAL_FIELDS = {45: ("unk", b"<unk>"), 46: ("bos", b"<s>"), 47: ("eod", b"</s>"), 48: ("pad", b"<pad>")}
"""Field of the trainer's settings -> meaning of the piece that the field names, and its default name."""


@dataclass(frozen=True)
class Piece:
    """One piece: its spelling, its score (log probability), and its type."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class ModelProto:
    """Properties of a model that determine its encoding.

    Attributes:
        pieces: pieces in the order of their ids.
        model_type: UNIGRAM, BPE or another.
        suffix_space: write a space at the end of a word, not at its beginning.
        charsmap: compiled rules of normalisation; empty for none.
        dummy_prefix: add a space before every text.
        fewer_spaces: merge runs of spaces, and strip spaces at the ends.
        escaped_spaces: write spaces as U+2581.
        special_ids: meaning (unk, bos, eod, pad) -> id, as far as the model has them.
        rules: the whole normaliser field of the file.
    """

    pieces: tuple[Piece, ...]
    model_type: int
    suffix_space: bool
    charsmap: bytes
    dummy_prefix: bool
    fewer_spaces: bool
    escaped_spaces: bool
    special_ids: dict[str, int]
    rules: bytes


def read_model_proto(content: bytes, origin: str) -> ModelProto:
    """Parse a .model.

    Raises:
        DataError: the content is not a SentencePiece model.
    """
    try:
        pieces: list[Piece] = []
        trainer: dict[int, int | bytes] = {}
        rules = b""
        for number, value in _fields(content):
            if number == 1 and isinstance(value, bytes):
                pieces.append(_piece(value))
            elif number == 2 and isinstance(value, bytes):
                trainer = dict(_fields(value))
            elif number == 3 and isinstance(value, bytes):
                rules = value
        normalizer = dict(_fields(rules))
        model_type = _number(trainer, 3, UNIGRAM)
    except (ValueError, IndexError, struct.error) as error:
        raise DataError(f"{origin}: is not a SentencePiece model: {error}") from None
    if not pieces:
        raise DataError(f"{origin}: is not a SentencePiece model: it has no pieces")
    charsmap = normalizer.get(2, b"")
    return ModelProto(
        tuple(pieces),
        model_type,
        suffix_space=bool(trainer.get(24, 0)),
        charsmap=charsmap if isinstance(charsmap, bytes) else b"",
        dummy_prefix=bool(normalizer.get(3, 1)),
        fewer_spaces=bool(normalizer.get(4, 1)),
        escaped_spaces=bool(normalizer.get(5, 1)),
        special_ids=_special_ids(pieces, trainer),
        rules=rules,
    )


def _special_ids(pieces: list[Piece], trainer: dict[int, int | bytes]) -> dict[str, int]:
    """Find special pieces as the library does: by name and type."""
    found: dict[str, int] = {}
    for field, (role, usual) in _SPECIAL_FIELDS.items():
        name = trainer.get(field, usual)
        kind = UNKNOWN if role == "unk" else CONTROL
        token = next((i for i, piece in enumerate(pieces) if piece.kind == kind and piece.text.encode() == name), None)
        if token is not None:
            found[role] = token
    return found


def _piece(content: bytes) -> Piece:
    values = dict(_fields(content))
    text, score = values.get(1, b""), values.get(2, bytes(4))
    if not isinstance(text, bytes) or not isinstance(score, bytes):
        raise ValueError("a piece has no text or score")
    return Piece(text.decode(), struct.unpack("<f", score)[0], _number(values, 3, NORMAL))


def _number(values: Mapping[int, int | bytes], field: int, usual: int) -> int:
    value = values.get(field, usual)
    if not isinstance(value, int):
        raise ValueError(f"field {field} is not a number")
    return value


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field: an int for a varint, else bytes."""
    place = 0
    while place < len(content):
        key, place = _varint(content, place)
        wire = key & 7
        if wire == 0:
            number, place = _varint(content, place)
            yield key >> 3, number
            continue
        if wire == 2:
            size, place = _varint(content, place)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {place}")
        if place + size > len(content):
            raise ValueError(f"it ends at byte {len(content)}, within a field of {size} bytes")
        yield key >> 3, content[place : place + size]
        place += size


def _varint(content: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        part = content[place]
        place += 1
        value |= (part & 0x7F) << shift
        if part < 0x80:
            return value, place
        shift += 7
        if shift > 63:
            raise ValueError(f"a number of more than 64 bits at byte {place}")

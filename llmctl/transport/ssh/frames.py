"""Frames for values between here and a login node: JSON for their shape, then raw bytes. Standard library, Python 3.7.

A frame is a header, JSON, and the bytes of all ``bytes`` values in the order of the JSON. The bytes are compressed if
they are large and shrink. Received data is never executed.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from llmctl.transport.commands import CommandOutput
from llmctl.transport.file_reads import FilePart, FileRead
from llmctl.transport.file_writes import FileWrite, PathFacts
from llmctl.transport.processes import ProcessIdentity, ProcessReport

LIMIT = 1 << 28
"""Bytes of one frame, before compression."""
_MAGIC = b"LLM1"
_HEADER = struct.Struct(">4sIII")  # magic, bytes of JSON, bytes of data as sent, bytes of data
_WORTH_COMPRESSING = 1 << 14
_CLASSES: dict[str, Callable[..., Any]] = {
    kind.__name__: kind
    for kind in (CommandOutput, FilePart, FileRead, FileWrite, PathFacts, ProcessIdentity, ProcessReport)
}


class FrameError(Exception):
    """Received data is not a frame, or a value exceeds the frame limit."""


def pack(value: Any) -> bytes:
    """Frame of a value: None, numbers, text, bytes, lists, tuples, mappings, and the data classes of this protocol.

    Raises:
        FrameError: the value is larger than LIMIT.
    """
    blobs: list[bytes] = []
    shape = json.dumps(_flatten(value, blobs), separators=(",", ":")).encode("ascii")
    data = b"".join(blobs)
    if len(shape) + len(data) > LIMIT:
        raise FrameError(f"{len(shape) + len(data)} bytes exceed the limit of {LIMIT} bytes for one answer")
    # Level 1: log text shrinks to a fifth at 100 MB/s and more, faster than most connections to a cluster.
    sent = zlib.compress(data, 1) if len(data) > _WORTH_COMPRESSING else data
    sent = sent if len(sent) < len(data) else data
    return _HEADER.pack(_MAGIC, len(shape), len(sent), len(data)) + shape + sent


class FrameReader:
    """Assembles frames from received data of any size."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> None:
        """Add received data."""
        self._pending += data

    def next(self) -> tuple[Any] | None:
        """Next value, in a tuple of one; None until its frame is complete.

        Raises:
            FrameError: the received data is not a frame.
        """
        if len(self._pending) < _HEADER.size:
            return None
        magic, shape_size, sent_size, size = _HEADER.unpack_from(self._pending)
        if magic != _MAGIC or shape_size + size > LIMIT or sent_size > size:
            raise FrameError(f"{bytes(self._pending[:60])!r} is not a frame")
        begin, end = _HEADER.size + shape_size, _HEADER.size + shape_size + sent_size
        if len(self._pending) < end:
            return None
        data = bytes(self._pending[begin:end])
        shape = json.loads(self._pending[_HEADER.size : begin].decode("ascii"))
        del self._pending[:end]
        return (_Builder(zlib.decompress(data) if sent_size < size else data).build(shape),)


def _flatten(value: Any, blobs: list[bytes]) -> Any:
    if isinstance(value, bytes):
        blobs.append(value)
        return {"bytes": len(value)}
    if isinstance(value, (list, tuple)):
        return [_flatten(item, blobs) for item in value]
    if isinstance(value, dict):
        return {"items": [[_flatten(key, blobs), _flatten(item, blobs)] for key, item in value.items()]}
    if is_dataclass(value):
        return {"kind": type(value).__name__, "of": [_flatten(getattr(value, f.name), blobs) for f in fields(value)]}
    return value


class _Builder:
    """Rebuilds values; takes the bytes from the data in the order of the shape."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def build(self, shape: Any) -> Any:
        if isinstance(shape, list):
            return [self.build(item) for item in shape]
        if not isinstance(shape, dict):
            return shape
        if "bytes" in shape:
            taken, self._data = bytes(self._data[: shape["bytes"]]), self._data[shape["bytes"] :]
            return taken
        if "items" in shape:
            return {self.build(key): self.build(item) for key, item in shape["items"]}
        parts = [self.build(item) for item in shape["of"]]
        # Sequences inside data classes are tuples, because the data classes are frozen.
        return _CLASSES[shape["kind"]](*(tuple(part) if isinstance(part, list) else part for part in parts))

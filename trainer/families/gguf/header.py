"""Header of a GGUF file: its keys, and the places of its tensors. Torch-free, and read in parts.

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.families.format.errors import FamilyError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a value -> its letter in struct."""
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_FLOAT32_TENSOR = 0
_ALIGNMENT, _MOST_DIMS = 32, 4
_FIRST_PART = 1 << 20
"""Bytes; each further part is twice as long, so that a vocabulary of 10 MB takes a few reads of another machine."""
_LONGEST = 1 << 30
"""Bytes of a value, far above those of any vocabulary."""

Read = Callable[[int, int], bytes]
"""Offset and limit -> bytes of the file, fewer at its end."""


@dataclass(frozen=True)
class GgufTensor:
    """Place of a tensor.

    Attributes:
        shape: the outer dim first.
        kind: number of ggml's type of its elements.
        offset: of its first byte in the file.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """Content of a header.

    Attributes:
        metadata: keys and values.
        tensors: name -> place.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name of each tensor -> its shape."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}


def is_gguf(path: Path) -> bool:
    """True if ``path`` is a GGUF file of this machine, by its first bytes."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_local_header(path: Path) -> GgufHeader:
    """The header of a file of this machine.

    Raises:
        FamilyError: the file cannot be read, is cut or damaged, or has another version of the format.
    """
    try:
        with path.open("rb") as file:
            return read_header(str(path), lambda offset, limit: _part(file, offset, limit))
    except OSError as error:
        raise FamilyError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_header(where: str, read: Read) -> GgufHeader:
    """The header of a file.

    Args:
        where: name of the file, for messages.
        read: of the file.

    Raises:
        FamilyError: the file is cut or damaged, or has another version of the format.
    """
    if read(0, len(MAGIC)) != MAGIC:
        raise FamilyError(f"{where}: is not a GGUF file: it does not begin with GGUF")
    bytes_ = _Bytes(where, read, len(MAGIC))
    version = bytes_.number("I")
    if version not in _VERSIONS:
        raise FamilyError(
            f"{where}: has version {version} of GGUF; only {' and '.join(map(str, _VERSIONS))} for little-endian "
            "machines are read; convert the model again"
        )
    num_tensors, num_keys = bytes_.number("Q"), bytes_.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        name = bytes_.text()
        metadata[name] = bytes_.value(bytes_.number("I"))
    found = [_tensor(bytes_) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise FamilyError(f"{where}: is damaged: general.alignment is {alignment!r}, not a power of two")
    begin = -(-bytes_.position // alignment) * alignment
    tensors = {name: GgufTensor(shape, kind, begin + offset) for name, shape, kind, offset in found}
    return GgufHeader(metadata, tensors)


def float32_elements(where: str, tensor: GgufTensor, read: Read) -> list[float]:
    """Elements of a tensor of one dim in float32.

    Raises:
        FamilyError: the tensor has another type, or the file is cut.
    """
    if tensor.kind != _FLOAT32_TENSOR or len(tensor.shape) != 1:
        raise FamilyError(f"{where}: is damaged: a table of float32 has another type")
    return list(_Bytes(where, read, tensor.offset).numbers("f", tensor.shape[0]))


def _part(file: Any, offset: int, limit: int) -> bytes:
    file.seek(offset)
    found: bytes = file.read(limit)
    return found


def _tensor(bytes_: _Bytes) -> tuple[str, tuple[int, ...], int, int]:
    name, dims = bytes_.text(), bytes_.number("I")
    if dims > _MOST_DIMS:
        raise bytes_.damage(f"{name} has {dims} dims")
    shape = tuple(int(size) for size in reversed(bytes_.numbers("Q", dims)))
    return name, shape, bytes_.number("I"), bytes_.number("Q")


class _Bytes:
    """Values one after the other, read in parts.

    Attributes:
        position: of the next value in the file.
    """

    def __init__(self, where: str, read: Read, position: int):
        self.position = position
        self._where, self._read = where, read
        self._part, self._begin, self._limit = b"", position, _FIRST_PART

    def damage(self, how: str) -> FamilyError:
        return FamilyError(f"{self._where}: is cut or damaged: {how}")

    def number(self, letter: str) -> int:
        return int(self.numbers(letter, 1)[0])

    def numbers(self, letter: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{letter}", self._take(count * struct.calcsize(f"<{letter}")))

    def text(self) -> str:
        content = self._take(self.number("Q"))
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise self.damage(f"text at byte {self.position - len(content)} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        if kind not in _NUMBERS:
            raise self.damage(f"a value before byte {self.position} has the unknown type {kind}")
        [number] = self.numbers(_NUMBERS[kind], 1)
        return _shortest(number) if kind == _FLOAT32 else number

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        if kind not in _NUMBERS:
            raise self.damage(f"an array before byte {self.position} has the unknown type {kind}")
        return list(self.numbers(_NUMBERS[kind], count))

    def _take(self, size: int) -> bytes:
        first = self.position - self._begin
        if first + size > len(self._part) and size <= _LONGEST:
            self._part = self._part[first:] + self._read(
                self._begin + len(self._part), max(self._limit, size - len(self._part) + first)
            )
            self._begin, self._limit, first = self.position, 2 * self._limit, 0
        if first + size > len(self._part):
            raise self.damage(f"it ends within a value at byte {self.position}")
        self.position += size
        return self._part[first : first + size]


def _shortest(number: float) -> float:
    """The shortest decimal that reads as this float32, as its writer meant it: 1e-05, not 9.99999974e-06."""
    decimals = (float(f"{number:.{digits}g}") for digits in range(6, 10))
    return next((found for found in decimals if struct.pack("<f", found) == struct.pack("<f", number)), number)

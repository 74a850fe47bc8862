"""Header of Megatron-LM's indexed dataset (megatron/core/datasets/indexed_dataset.py), and its relation to the files.

trainer.data.indexed.index_format describes the whole format.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, str] = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Dtype codes of integer tokens."""
_FLOATS = {6: "float64", 7: "float32"}
"""Dtype codes that cannot be tokens."""


class FormatError(ValueError):
    """A damaged file: one sentence with the file, the problem and the remedy."""


@dataclass(frozen=True)
class IndexHeader:
    """Header of an .idx.

    Attributes:
        dtype: numpy's name of the tokens' dtype.
        sequences: number of sequences.
        entries: number of entries in the table of documents: one more than documents.
    """

    dtype: str
    sequences: int
    entries: int

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return int(self.dtype[-1])

    @property
    def pointers(self) -> int:
        """Offset of the table of byte offsets, i64, behind that of the lengths, i32."""
        return HEADER.size + 4 * self.sequences

    @property
    def documents(self) -> int:
        """Offset of the table of documents, i64."""
        return self.pointers + 8 * self.sequences


def read_header(where: object, header: bytes, size: int) -> IndexHeader:
    """Read the header of an .idx.

    Args:
        where: path of the .idx, for messages.
        header: its first bytes.
        size: of the whole file.

    Raises:
        FormatError: the file is not an index, of another version or kind, or has another size than its tables.
    """
    if header[: len(MAGIC)] != MAGIC:
        raise FormatError(
            f"{where}: is not a Megatron-LM index (it starts with {header[:9]!r}); prepare the data again"
        )
    if len(header) < HEADER.size:
        raise FormatError(f"{where}: is truncated within its header, at {size} bytes; prepare the data again")
    _, version, code, sequences, entries = HEADER.unpack(header[: HEADER.size])
    if version != VERSION:
        raise FormatError(f"{where}: is index version {version}; only version {VERSION} is supported")
    if code not in DTYPES:
        what = f"{_FLOATS[code]} (dtype code {code})" if code in _FLOATS else f"dtype code {code}"
        raise FormatError(f"{where}: has {what}, which is not an integer token type (valid: {sorted(DTYPES)})")
    expected = HEADER.size + 12 * sequences + 8 * entries
    if sequences and size == expected + sequences:
        raise FormatError(
            f"{where}: is a multimodal index of Megatron-LM, with a mode for each of {sequences:,} sequences; "
            "only text is supported"
        )
    if size != expected:
        raise FormatError(
            f"{where}: has {size:,} bytes, but {sequences:,} sequences and {entries:,} document entries "
            f"need {expected:,}; the file is damaged or truncated, prepare the data again"
        )
    return IndexHeader(DTYPES[code], sequences, entries)


def check_token_size(where: object, size: int, token_bytes: int) -> None:
    """Check that a .bin holds whole tokens.

    Raises:
        FormatError: its size is not a multiple of a token's.
    """
    if size % token_bytes:
        raise FormatError(
            f"{where}: its size of {size:,} bytes is not a multiple of the token size {token_bytes}; the "
            "file is truncated or belongs to other data, prepare the data again"
        )


def check_listed_size(where: object, index: str, size: int, listed: int) -> None:
    """Check that a .bin has the size that its index lists.

    Raises:
        FormatError: the sizes differ; names both.
    """
    if size != listed:
        raise FormatError(
            f"{where}: has {size:,} bytes, but {index} lists {listed:,}; one of the two files is "
            "truncated or belongs to other data, prepare the data again"
        )


def check_counts(where: object, stated: Mapping[str, int], found: Mapping[str, int]) -> None:
    """Check the counts of a manifest.

    Args:
        where: path of the manifest.
        stated: what it states, by name.
        found: counts of the dataset, by name.

    Raises:
        FormatError: a count differs; names both.
    """
    wrong = [f"{stated[name]:,} {name} (there are {n:,})" for name, n in found.items() if n != stated[name]]
    if wrong:
        raise FormatError(
            f"{where}: states {' and '.join(wrong)}: the manifest belongs to other data; remove it, or prepare the "
            "data again"
        )

"""Cache folder of sentence mappings, memory-mapped and shared by a node's processes.

The key of an entry covers all inputs of the mapping, so that an entry is never stale. Entries are written atomically,
so that concurrent processes may build and write. An entry is a little-endian file:

    8 bytes MAGIC | u64 samples N | u64 bytes per number | u64 CRC-32 of the rest | u32[N, 3] or i64[N, 3] rows
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from trainer.data.indexed.cache_entry import write_entry
from trainer.data.indexed.mapped_file import map_file
from trainer.data.masked.sentence_mapping import MappingRules, Rows, build_mapping

MAGIC = b"SENTMAP2"
HEADER = struct.Struct("<8sQQQ")
SMALLEST_CACHED = 1 << 16
"""Fewest samples of a cached mapping: these take 50 ms to build on one core."""


def load_or_build_mapping(
    folder: Path | None,
    document_indices: npt.NDArray[np.int64],
    sentence_lengths: npt.NDArray[np.int32],
    rules: MappingRules,
    num_samples: int | None,
    smallest: int = SMALLEST_CACHED,
) -> Rows:
    """Load the mapping from ``folder``, or build and, if possible, write it."""
    if folder is None or len(document_indices) < 2:
        return build_mapping(document_indices, sentence_lengths, rules, num_samples)
    entry = folder / f"{_key(document_indices, sentence_lengths, rules, num_samples)}.mapping"
    found = _open(entry)
    if found is not None:
        return found
    rows = build_mapping(document_indices, sentence_lengths, rules, num_samples)
    if len(rows) < smallest:
        return rows
    with suppress(OSError):
        write_entry(entry, partial(_write, rows))
    # Pages of the file are shared with the other processes of the node; the built array is not.
    found = _open(entry)
    return rows if found is None else found


def _key(
    document_indices: npt.NDArray[np.int64],
    sentence_lengths: npt.NDArray[np.int32],
    rules: MappingRules,
    num_samples: int | None,
) -> str:
    first, last = int(document_indices[0]), int(document_indices[-1])
    asked = f"{MAGIC!r} {rules} {num_samples} {len(document_indices)} {len(sentence_lengths)}\n"
    digest = hashlib.blake2b(asked.encode(), digest_size=16)
    digest.update(np.ascontiguousarray(document_indices, "<i8").data)
    digest.update(np.ascontiguousarray(sentence_lengths[first:last], "<i4").data)
    return digest.hexdigest()


def _open(entry: Path) -> Rows | None:
    try:
        content = map_file(entry, np.dtype("u1"))
        magic, count, width, checksum = HEADER.unpack(content[: HEADER.size].tobytes())
    except (OSError, struct.error):
        return None
    if magic != MAGIC or width not in (4, 8) or len(content) != HEADER.size + 3 * count * width:
        return None
    if zlib.crc32(content[HEADER.size :].data) != checksum:
        return None
    numbers: Rows = content[HEADER.size :].view("<u4" if width == 4 else "<i8")
    return numbers.reshape(-1, 3)


def _write(rows: Rows, file: BinaryIO) -> None:
    content = np.ascontiguousarray(rows)
    file.write(HEADER.pack(MAGIC, len(rows), rows.dtype.itemsize, zlib.crc32(content.data)))
    content.tofile(file)

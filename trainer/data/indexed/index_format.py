"""Format of Megatron-LM's indexed dataset (megatron/core/datasets/indexed_dataset.py).

Little endian:

    .bin  the concatenated tokens of all sequences
    .idx  9 bytes "MMIDIDX" 0 0 | u64 version 1 | u8 dtype | u64 S sequences | u64 D = documents + 1
          i32[S] sequence lengths | i64[S] byte offsets into .bin | i64[D] first sequence of each document, and S

A document is one sequence, or one sequence per sentence if the text was split into sentences. An empty document has an
entry in the last table and no sequence, or (from Megatron-LM's preprocess_data_fast.py) a sequence of length 0.
Multimodal data has i8[S] modes at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trainer.data.errors import DataError

CHUNK = 1 << 20
"""Entries in memory at a time while an index is written or checked: 8 MiB of int64."""


def dtype_code(vocab_size: int) -> int:
    """Megatron-LM's dtype code: 8 (u16) below 65,500 tokens, else 4 (i32)."""
    return 8 if vocab_size < 65_500 else 4


def files_of(prefix: Path) -> tuple[Path, Path]:
    """Paths of the .bin and the .idx of a prefix, which may contain dots."""
    # with_name would fail for "." and "/", which have no name.
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def prefixes_at(path: Path) -> list[Path]:
    """Prefixes that ``path`` names, sorted.

    ``path`` is a prefix, one of its files, or a folder of indexed datasets. The files are not opened.
    """
    if path.is_dir() and not any(file.is_file() for file in files_of(path)):
        return sorted({_without_suffix(file) for file in path.iterdir() if file.suffix in (".bin", ".idx")})
    return [_without_suffix(path)]


def named_prefixes(paths: Iterable[Path]) -> list[Path]:
    """Prefixes that ``paths`` name, with ``~`` expanded.

    A dataset that a shell pattern PREFIX* names by all its files occurs once; a dataset named twice by the same path
    occurs twice.

    Raises:
        DataError: a path is a folder without indexed datasets.
    """
    found: list[Path] = []
    words: dict[Path, Path] = {}
    for path in paths:
        inside = prefixes_at(path.expanduser())
        if not inside:
            raise DataError(
                f"{path}: is a folder without .bin or .idx files; name the prefix of a dataset, or its folder"
            )
        found += [prefix for prefix in inside if words.setdefault(prefix, path) == path]
    return found


def _without_suffix(path: Path) -> Path:
    is_manifest = path.suffix == ".json" and any(file.is_file() for file in files_of(path.with_suffix("")))
    return path.with_suffix("") if is_manifest or path.suffix in (".bin", ".idx") else path

"""Lists of the tensors that each rank has written, which rank 0 joins to one. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainer.checkpoint.checksums import WrittenFile
from trainer.checkpoint.directory import CheckpointError
from trainer.checkpoint.metadata import StoredTensor, stored_key, stored_tensor


def index_path(temporary: Path, rank: int) -> Path:
    """File in which a rank lists the tensors that it wrote."""
    return temporary / f"index_{rank:05d}.json"


def gather_indexes(
    temporary: Path, writers: Sequence[int]
) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, int], dict[str, list[int]]]:
    """Merge the ranks' lists: tensors by kind and name, sizes of files, and checksums of their blocks.

    Every file is opened by its name: a listing of the folder may come from a cache of this node that lacks files that
    other nodes have just made, while the server is asked for a name that was never looked up (nfs(5), lookupcache).

    Args:
        temporary: the folder.
        writers: all ranks that wrote a file.

    Raises:
        CheckpointError: the parts of a tensor overlap, leave gaps, or differ in shape or dtype.
        OSError: the list of a rank cannot be read.
    """
    written: dict[str, WrittenFile] = {}
    found: dict[tuple[str, str], list[StoredTensor]] = {}
    for path in (index_path(temporary, rank) for rank in writers):
        index = json.loads(path.read_text(encoding="utf-8"))
        written |= {name: WrittenFile(*values) for name, values in index["files"].items()}
        for kind, named in index["tensors"].items():
            for name, values in named.items():
                found.setdefault((kind, name), []).append(stored_tensor(values))
        path.unlink()
    tensors: dict[str, dict[str, StoredTensor]] = {}
    for (kind, name), held in found.items():
        tensors.setdefault(kind, {})[name] = _joined(stored_key(kind, name), held)
    sizes = {name: file.size for name, file in written.items()}
    return tensors, sizes, {name: file.checksums for name, file in written.items()}


def _joined(key: str, held: Sequence[StoredTensor]) -> StoredTensor:
    """One tensor from the parts that each rank holds."""
    first, *others = held
    for other in others:
        if (other.shape, other.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{key} is {first.dtype} {list(first.shape)} on one rank, {other.dtype} {list(other.shape)} on another"
            )
    parts = sorted((part for tensor in held for part in tensor.parts), key=lambda part: part[2:])
    whole = replace(first, parts=tuple(parts))
    if not whole.is_complete:
        raise CheckpointError(f"the ranks' parts of {key} do not cover the tensor exactly once")
    return whole

"""Indexed datasets for tests: written document by document, or recorded from Megatron-LM."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.data.indexed.index_format import dtype_code
from trainer.data.indexed.manifest import Manifest
from trainer.data.indexed.writer import IndexedDatasetWriter

RECORDED = Path(__file__).parents[2] / "recorded" / "megatron_data"
"""Files written by Megatron-LM itself: see tests/record_megatron_data.py."""


def write(prefix: Path, documents: Sequence[Sequence[int]], vocab_size: int = 1000) -> None:
    """Write a dataset of documents of one sequence each, or none if empty."""
    write_sequences(prefix, [[document] if document else [] for document in documents], vocab_size)


def write_sequences(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], vocab_size: int = 1000) -> None:
    """Write a dataset of documents, each a list of sequences of tokens."""
    with IndexedDatasetWriter(prefix, dtype_code(vocab_size)) as writer:
        for document in documents:
            tokens = np.array([token for sequence in document for token in sequence], np.int64)
            lengths = np.array([len(sequence) for sequence in document], np.int64)
            writer.append(tokens, lengths, np.array([len(lengths)]))
        writer.finish()


def write_joined(prefix: Path, tokens: npt.ArrayLike, lengths: npt.ArrayLike, vocab_size: int = 1000) -> None:
    """Write a dataset of one-sequence documents, from concatenated tokens and their lengths."""
    sizes = np.asarray(lengths)
    assert sizes.min() > 0
    with IndexedDatasetWriter(prefix, dtype_code(vocab_size)) as writer:
        writer.append(np.asarray(tokens), sizes, np.arange(1, len(sizes) + 1))
        writer.finish()


def describe(prefix: Path, documents: Sequence[Sequence[int]], **other: object) -> Manifest:
    """Write a dataset with a manifest."""
    with IndexedDatasetWriter(prefix, dtype_code(1000)) as writer:
        for document in documents:
            lengths = np.array([len(document)] if document else [], np.int64)
            writer.append(np.array(document, np.int64), lengths, np.array([len(lengths)]))
        largest = max((token for document in documents for token in document), default=-1)
        known = (writer.documents, writer.sequences, writer.tokens, largest)
        checksums = writer.finish()
    values: dict[str, object] = {"tokenizer_sha256": "ab" * 32, "vocab_size": 1000, "eod": 0, **other}
    manifest = Manifest(values["tokenizer_sha256"], values["vocab_size"], values["eod"], *known, 10, *checksums)  # type: ignore[arg-type]
    manifest.write(prefix)
    return manifest


def unpack(name: str, folder: Path) -> None:
    """Write a dataset recorded from Megatron-LM into ``folder``."""
    with np.load(RECORDED / "formats.npz") as files:
        for part in ("bin", "idx"):
            (folder / f"{name}.{part}").write_bytes(files[f"{name}.{part}"].tobytes())


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """Limit the size of files for this process, which acts like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

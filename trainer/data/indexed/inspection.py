"""Inspection of an indexed dataset: counts, lengths, samples, damage. Needs some megabytes of memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.data.errors import DataError
from trainer.data.indexed.index_format import CHUNK, files_of
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.indexed.manifest import Manifest, read_manifest
from trainer.data.tokenizers.tokenizer import Tokenizer

PERCENTS = (1, 5, 25, 50, 75, 95, 99)
SAMPLE_TOKENS = 48
_DENSE = 1 << 20
"""Shorter documents are counted in a table. Longer ones hold a million tokens each, so that there are few of them."""
_BLOCK = 8 * CHUNK

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LengthRange:
    """Documents of ``shortest`` to ``longest`` tokens, inclusive."""

    shortest: int
    longest: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Lengths:
    """Lengths of the non-empty documents."""

    shortest: int
    longest: int
    mean: float
    percentiles: dict[int, int]
    """Percentile of the lengths for each of PERCENTS (nearest rank)."""
    ranges: tuple[LengthRange, ...]
    """Histogram by powers of two, from the shortest to the longest document."""


@dataclass(frozen=True)
class Sample:
    """Beginning of a document."""

    document: int
    tokens: int
    """Number of tokens of the whole document."""
    ids: tuple[int, ...]
    text: str | None
    """Decoded text; None: no tokenizer was given."""


@dataclass(frozen=True)
class Contents:
    """Result of reading all tokens."""

    smallest_token: int
    largest_token: int
    """-1 for a dataset without tokens."""
    ends: int | None
    """Occurrences of the manifest's end-of-document token; None: the manifest names no token."""
    bin_sha256: str
    idx_sha256: str
    compared: bool
    """True if the manifest had checksums to compare."""


@dataclass(frozen=True)
class Inspection:
    """Result of the inspection of one prefix.

    A dataset that cannot be opened has only its problem.
    """

    prefix: str
    problems: tuple[str, ...] = ()
    """Problems found, one sentence each."""
    dtype: str | None = None
    documents: int = 0
    empty_documents: int = 0
    sequences: int = 0
    tokens: int = 0
    bin_bytes: int = 0
    idx_bytes: int = 0
    lengths: Lengths | None = None
    manifest: Manifest | None = None
    samples: tuple[Sample, ...] = ()
    contents: Contents | None = None


def inspect_dataset(
    prefix: Path, tokenizer: Tokenizer | None = None, tokenizer_name: str = "", samples: int = 3, verify: bool = False
) -> Inspection:
    """Inspect the dataset of ``prefix``; problems are part of the result.

    Args:
        prefix: path without .bin or .idx.
        tokenizer: decodes the samples; None: no decoding.
        tokenizer_name: name of the tokenizer in problems.
        samples: number of documents to show, spread evenly over the non-empty ones.
        verify: read all tokens and compare the checksums.
    """
    try:
        tokens = IndexedDataset(prefix)
    except DataError as error:
        return Inspection(str(prefix), (str(error),))
    problems: list[str] = []
    with tokens:
        manifest = _manifest(tokens, problems)
        if tokenizer is not None and manifest is not None:
            try:
                manifest.check_tokenizer(prefix, tokenizer, tokenizer_name)
            except DataError as error:
                problems.append(str(error))
                tokenizer = None
        lengths, empty = measure_lengths(tokens)
        shown = tuple(_sample(tokens, number, tokenizer) for number in _spread(tokens, samples))
        contents = None
        if verify:
            try:
                contents = _read_contents(tokens, manifest)
            except OSError as error:  # a disk or file server that fails
                problems.append(f"{error.filename or prefix}: reading failed: {error.strerror}")
        if contents is not None:
            problems += _content_problems(tokens, contents, manifest, tokenizer, tokens.document_count - empty)
        bin_bytes, idx_bytes = (path.stat().st_size for path in files_of(prefix))
        return Inspection(
            prefix=str(prefix),
            problems=tuple(problems),
            dtype=tokens.dtype.name,
            documents=tokens.document_count,
            empty_documents=empty,
            sequences=len(tokens),
            tokens=tokens.token_count,
            bin_bytes=bin_bytes,
            idx_bytes=idx_bytes,
            lengths=lengths,
            manifest=manifest,
            samples=shown,
            contents=contents,
        )


def _manifest(tokens: IndexedDataset, problems: list[str]) -> Manifest | None:
    try:
        manifest = read_manifest(tokens.prefix)
        if manifest is not None:
            manifest.check_counts(tokens)
    except DataError as error:
        problems.append(str(error))
        return None
    return manifest


def measure_lengths(tokens: IndexedDataset) -> tuple[Lengths | None, int]:
    """Lengths of the non-empty documents (None: no such), and the number of empty ones."""
    dense = np.zeros(_DENSE, np.int64)
    long: list[Int64Array] = []
    for first in range(0, tokens.document_count, CHUNK):
        # A document ends where the next document begins.
        starts = tokens.first_tokens(tokens.document_indices[first : first + CHUNK + 1])
        sizes = np.diff(starts)
        dense += np.bincount(sizes[sizes < _DENSE], minlength=_DENSE)
        long.append(sizes[sizes >= _DENSE])
    few, counts = np.unique(np.concatenate([*long, np.zeros(0, np.int64)]), return_counts=True)
    empty = int(dense[0])
    dense[0] = 0
    known = np.flatnonzero(dense)
    values, counts = np.concatenate([known, few]), np.concatenate([dense[known], counts])
    if not len(values):
        return None, empty
    seen = np.cumsum(counts)
    ranks = {percent: -(-percent * int(seen[-1]) // 100) for percent in PERCENTS}
    percentiles = {percent: int(values[np.searchsorted(seen, rank)]) for percent, rank in ranks.items()}
    mean = tokens.token_count / int(seen[-1])
    return Lengths(int(values[0]), int(values[-1]), mean, percentiles, _ranges(values, counts)), empty


def _ranges(values: Int64Array, counts: Int64Array) -> tuple[LengthRange, ...]:
    powers = range(int(values[0]).bit_length() - 1, int(values[-1]).bit_length())
    found = []
    for power in powers:
        inside = slice(*np.searchsorted(values, [1 << power, 2 << power]))
        documents, tokens = int(counts[inside].sum()), int((counts[inside] * values[inside]).sum())
        found.append(LengthRange(1 << power, (2 << power) - 1, documents, tokens))
    return tuple(found)


def _spread(tokens: IndexedDataset, count: int) -> list[int]:
    """Choose non-empty documents: the first at or after each of ``count`` evenly spread places."""
    chosen = []
    for place in np.linspace(0, tokens.document_count, count, endpoint=False, dtype=np.int64):
        begins = tokens.first_token(int(tokens.document_indices[place]))
        low, high = int(place), tokens.document_count
        # Find the last document that begins at this token: of several at one position, all but the last are empty.
        while high - low > 1:
            middle = (low + high) // 2
            is_there = tokens.first_token(int(tokens.document_indices[middle])) == begins
            low, high = (middle, high) if is_there else (low, middle)
        if begins < tokens.token_count:
            chosen.append(low)
    return list(dict.fromkeys(chosen))


def _sample(tokens: IndexedDataset, document: int, tokenizer: Tokenizer | None) -> Sample:
    first, last = (int(entry) for entry in tokens.document_indices[document : document + 2])
    start, stop = tokens.first_token(first), tokens.first_token(last)
    ids = tokens.read(start, min(stop, start + SAMPLE_TOKENS)).tolist()
    usable = tokenizer is not None and all(0 <= token < tokenizer.vocab_size for token in ids)
    text = tokenizer.decode(ids) if tokenizer is not None and usable else None
    return Sample(document, stop - start, tuple(ids), text)


def _read_contents(tokens: IndexedDataset, manifest: Manifest | None) -> Contents:
    bin_file, idx_file = files_of(tokens.prefix)
    digests = [hashlib.sha256(), hashlib.sha256()]
    lows, highs, ends = [], [-1], 0
    eod = None if manifest is None else manifest.eod
    # Read instead of using the mapping, whose pages would count as memory of this process.
    with bin_file.open("rb") as file:
        while block := file.read(_BLOCK):
            digests[0].update(block)
            ids = np.frombuffer(block, tokens.dtype)
            lows.append(int(ids.min()))
            highs.append(int(ids.max()))
            ends += 0 if eod is None else int(np.count_nonzero(ids == eod))
    with idx_file.open("rb") as file:
        while block := file.read(_BLOCK):
            digests[1].update(block)
    return Contents(
        min(lows, default=-1),
        max(highs),
        None if eod is None else ends,
        digests[0].hexdigest(),
        digests[1].hexdigest(),
        compared=manifest is not None and manifest.bin_sha256 is not None,
    )


def _content_problems(
    tokens: IndexedDataset,
    contents: Contents,
    manifest: Manifest | None,
    tokenizer: Tokenizer | None,
    filled: int,
) -> Sequence[str]:
    bin_file, idx_file = files_of(tokens.prefix)
    problems = []
    if manifest is not None and contents.compared:
        pairs = (
            (bin_file, contents.bin_sha256, manifest.bin_sha256),
            (idx_file, contents.idx_sha256, manifest.idx_sha256),
        )
        problems += [
            f"{path}: is damaged: its SHA-256 begins with {found[:12]}, but the manifest has {str(wanted)[:12]}; "
            "prepare the data again"
            for path, found, wanted in pairs
            if found != wanted
        ]
    known = [size for size in (manifest and manifest.vocab_size, tokenizer and tokenizer.vocab_size) if size]
    if tokens.token_count and (contents.smallest_token < 0 or (known and contents.largest_token >= min(known))):
        wrong = contents.smallest_token if contents.smallest_token < 0 else contents.largest_token
        vocabulary = f"a vocabulary of {min(known):,} has 0 to {min(known) - 1:,}" if known else "token ids start at 0"
        problems.append(f"{bin_file}: holds token {wrong}; {vocabulary}")
    # More ends than documents are allowed: a text may hold the token.
    if contents.ends is not None and contents.ends < filled:
        problems.append(
            f"{bin_file}: the end-of-document token occurs {contents.ends:,} times in {filled:,} documents; some "
            "documents lack the token, or the files are damaged"
        )
    return problems

"""What a .bin/.idx pair holds, and whether it is whole: counts, lengths, samples, damage. Memory: some megabytes."""

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
"""Lengths below are counted in a table; documents as long as that are few, as they hold a million tokens each."""
_BLOCK = 8 * CHUNK

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LengthRange:
    """The documents of ``shortest`` to ``longest`` tokens, both included."""

    shortest: int
    longest: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Lengths:
    """How long the documents are that hold tokens."""

    shortest: int
    longest: int
    mean: float
    percentiles: dict[int, int]
    """For each percent of PERCENTS the least length that so many of the documents do not exceed (nearest rank)."""
    ranges: tuple[LengthRange, ...]
    """By powers of two, from the range of the shortest to that of the longest."""


@dataclass(frozen=True)
class Sample:
    """How a document begins."""

    document: int
    tokens: int
    """In the whole document."""
    ids: tuple[int, ...]
    text: str | None
    """None: no tokenizer was at hand."""


@dataclass(frozen=True)
class Contents:
    """What the tokens themselves say, read from beginning to end."""

    smallest_token: int
    largest_token: int
    """-1 where there are no tokens."""
    ends: int | None
    """How often the manifest's end-of-document token occurs; None where it names none."""
    bin_sha256: str
    idx_sha256: str
    compared: bool
    """Whether the manifest had checksums to compare with."""


@dataclass(frozen=True)
class Inspection:
    """What was found at one prefix. A pair that cannot be opened has nothing but its problem."""

    prefix: str
    problems: tuple[str, ...] = ()
    """One sentence each; none: nothing is wrong, as far as was looked."""
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


def inspect_pair(
    prefix: Path, tokenizer: Tokenizer | None = None, tokenizer_name: str = "", samples: int = 3, verify: bool = False
) -> Inspection:
    """Look at the pair of ``prefix``; what is wrong with it stands in the result.

    Args:
        prefix: path without .bin or .idx.
        tokenizer: what to decode samples with.
        tokenizer_name: how to call it in a problem.
        samples: how many documents to show the beginnings of, evenly over all that hold tokens.
        verify: read all tokens and compare checksums.
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
                problems.append(f"{error.filename or prefix}: cannot be read to its end: {error.strerror}")
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
    """Lengths of the documents that hold tokens (None: there is none), and how many documents hold none."""
    dense = np.zeros(_DENSE, np.int64)
    long: list[Int64Array] = []
    for first in range(0, tokens.document_count, CHUNK):
        # A document ends where the next one begins.
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
    """``count`` documents that hold tokens: the first at or after each of as many evenly spread places."""
    chosen = []
    for place in np.linspace(0, tokens.document_count, count, endpoint=False, dtype=np.int64):
        begins = tokens.first_token(int(tokens.document_indices[place]))
        low, high = int(place), tokens.document_count
        # The last document that begins with this token: of several at one place, all but the last are empty.
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
    # Not the mapping: pages that were only looked at would count as our memory.
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
            f"{path}: is damaged: its SHA-256 begins with {found[:12]} and was {str(wanted)[:12]} when it was written; "
            "prepare the data again"
            for path, found, wanted in pairs
            if found != wanted
        ]
    known = [size for size in (manifest and manifest.vocab_size, tokenizer and tokenizer.vocab_size) if size]
    if tokens.token_count and (contents.smallest_token < 0 or (known and contents.largest_token >= min(known))):
        wrong = contents.smallest_token if contents.smallest_token < 0 else contents.largest_token
        vocabulary = f"a vocabulary of {min(known):,} has 0 to {min(known) - 1:,}" if known else "no vocabulary has it"
        problems.append(f"{bin_file}: holds token {wrong}; {vocabulary}")
    if contents.ends is not None and contents.ends < filled:
        problems.append(
            f"{bin_file}: the token that ends a document occurs {contents.ends:,} times in {filled:,} documents; it "
            "was not appended to all, or the files are damaged"
        )
    return problems

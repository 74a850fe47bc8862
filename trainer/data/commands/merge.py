"""``llmctl data merge``: many .bin/.idx pairs to one, as Megatron-LM's tools/merge_datasets.py joins them.

One large pair opens faster than a thousand small ones, and blends as one source.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from trainer.config.data_flags import parse
from trainer.data.errors import DataError
from trainer.data.indexed.index_format import CHUNK, DTYPES, files_of, named_prefixes
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.indexed.manifest import Manifest, manifest_path, read_manifest
from trainer.data.indexed.writer import PairWriter, remove_partials

_BLOCK = 8 * CHUNK
_NONE = np.zeros(0, np.int64)
_PROGRESS_SECONDS = 2.0


@dataclass(frozen=True)
class _Source:
    prefix: Path
    dtype: np.dtype[np.generic]
    bin_bytes: int
    idx_bytes: int
    manifest: Manifest | None


def merge_pairs(
    prefixes: Sequence[Path], output: Path, report: Callable[[int, int], None] | None = None
) -> Manifest | None:
    """Write the documents of ``prefixes``, in this order, to the pair of ``output``, with a manifest if they have one.

    Memory: some megabytes and, where pages are counted, one index. Where there are checksums they are compared.

    Args:
        prefixes: what to join; all of one dtype, and where they have manifests of one tokenizer.
        output: prefix to write; an earlier pair stays until the new one is whole.
        report: called now and then with the bytes of tokens done and those there are.

    Raises:
        DataError: a pair is damaged, or they do not go together; nothing was written.
        OSError: the output cannot be written; nothing of it is left.
    """
    sources = [_examine(prefix) for prefix in prefixes]
    _check_together(sources, output)
    merged = _merged_manifest(sources, output)
    # Of a run that was killed; it may have filled the disk.
    remove_partials(output)
    _check_room(sources, output)
    code = next(code for code, name in DTYPES.items() if np.dtype(name) == sources[0].dtype)
    total = sum(source.bin_bytes for source in sources)
    with PairWriter(output, code) as writer:

        def tell() -> None:
            if report is not None:
                report(writer.tokens * writer.dtype.itemsize, total)

        for source in sources:
            _copy(source, writer, tell)
        # Never an old manifest beside new tokens.
        manifest_path(output).unlink(missing_ok=True)
        checksums = writer.finish()
    if merged is None:
        return None
    merged = replace(merged, bin_sha256=checksums.bin_sha256, idx_sha256=checksums.idx_sha256)
    merged.write(output)
    return merged


def _examine(prefix: Path) -> _Source:
    manifest = read_manifest(prefix)
    with IndexedDataset(prefix) as tokens:
        if manifest is not None:
            manifest.check_counts(tokens)
        bin_bytes, idx_bytes = (path.stat().st_size for path in files_of(prefix))
        return _Source(prefix, tokens.dtype, bin_bytes, idx_bytes, manifest)


def _check_together(sources: Sequence[_Source], output: Path) -> None:
    if not sources:
        raise DataError("--input: there is no .bin/.idx pair to merge; name prefixes, or folders that hold pairs")
    first = sources[0]
    for source in sources:
        if os.path.realpath(files_of(source.prefix)[0]) == os.path.realpath(files_of(output)[0]):
            raise DataError(f"{output}: is one of the pairs to merge; write the result somewhere else")
        if source.dtype != first.dtype:
            raise DataError(
                f"{source.prefix}: has {source.dtype} tokens and {first.prefix} has {first.dtype}: they were made for "
                "different vocabularies; merge those of one tokenizer"
            )


def _merged_manifest(sources: Sequence[_Source], output: Path) -> Manifest | None:
    manifests = [(source.prefix, source.manifest) for source in sources if source.manifest is not None]
    if not manifests:
        return None
    if len(manifests) < len(sources):
        without = next(source.prefix for source in sources if source.manifest is None)
        raise DataError(
            f"{without}: has no manifest, and {manifests[0][0]} has one: nothing tells whether one tokenizer made "
            f"both; if one did, move the manifests (.json) away, and {output} gets none"
        )
    prefix, first = manifests[0]
    for other, manifest in manifests:
        for name in ("tokenizer_sha256", "vocab_size", "eod"):
            mine, theirs = getattr(first, name), getattr(manifest, name)
            if mine != theirs:
                raise DataError(
                    f"{other}: was prepared with {name} {str(theirs)[:12]} and {prefix} with {str(mine)[:12]}; merge "
                    "what was prepared alike"
                )
    parts = [manifest for _, manifest in manifests]
    return replace(
        first,
        documents=sum(part.documents for part in parts),
        sequences=sum(part.sequences for part in parts),
        tokens=sum(part.tokens for part in parts),
        largest_token=max(part.largest_token for part in parts),
        text_bytes=sum(part.text_bytes for part in parts),
        schema=2,
    )


def _check_room(sources: Sequence[_Source], output: Path) -> None:
    place = next(folder for folder in output.absolute().parents if folder.is_dir())
    # The tables of the index are written apart before they are joined.
    needed = sum(source.bin_bytes + 2 * source.idx_bytes for source in sources)
    free = shutil.disk_usage(place).free
    if free < needed:
        raise DataError(f"{place}: has {free / 1e9:,.1f} GB free, and {output} takes {needed / 1e9:,.1f} GB")


def _copy(source: _Source, writer: PairWriter, report: Callable[[], None]) -> None:
    manifest = source.manifest
    has_checksums = manifest is not None and manifest.bin_sha256 is not None
    checksums = [hashlib.sha256(), hashlib.sha256()]
    expected_tokens = writer.tokens + source.bin_bytes // source.dtype.itemsize
    bin_file, idx_file = files_of(source.prefix)
    with IndexedDataset(source.prefix) as tokens:
        for first in range(1, tokens.document_count + 1, CHUNK):
            writer.append(_NONE, _NONE, tokens.document_indices[first : first + CHUNK])
        for first in range(0, len(tokens), CHUNK):
            writer.append(_NONE, tokens.sequence_lengths[first : first + CHUNK], _NONE)
        # Not the mapping: pages that were only copied would count as our memory.
        with bin_file.open("rb") as file:
            # Half a token is left where somebody cuts the file off meanwhile.
            while (block := file.read(_BLOCK)) and len(block) % source.dtype.itemsize == 0:
                if has_checksums:
                    checksums[0].update(block)
                writer.append(np.frombuffer(block, source.dtype), _NONE, _NONE)
                report()
    if writer.tokens != expected_tokens:
        raise DataError(f"{bin_file}: has changed while it was read; merge again when nobody writes it")
    if manifest is None or not has_checksums:
        return
    with idx_file.open("rb") as file:
        while block := file.read(_BLOCK):
            checksums[1].update(block)
    wanted = (manifest.bin_sha256, manifest.idx_sha256)
    for path, checksum, expected in zip((bin_file, idx_file), checksums, wanted, strict=True):
        if checksum.hexdigest() != expected:
            raise DataError(f"{path}: is damaged: its SHA-256 is not that of its manifest; prepare it again")


def main(arguments: Sequence[str]) -> int:
    """Run the command; 3 if the pairs cannot be merged or the result not be written, with one line that says why."""
    options = parse("merge", arguments)
    output = Path(options.output_prefix).expanduser()
    try:
        if options.output_prefix.endswith(os.sep) or output.name in ("", ".."):
            raise DataError(f"--output-prefix: {options.output_prefix or '.'} is a folder; add a name for the pair")
        prefixes = named_prefixes(map(Path, options.input))
        manifest = merge_pairs(prefixes, output, _Progress().report)
    except DataError as error:
        print(f"llmctl data merge: {error}", file=sys.stderr)
        return 3
    except OSError as error:
        place = error.filename or output
        print(f"llmctl data merge: {place}: cannot be used: {error.strerror}", file=sys.stderr)
        return 3
    with IndexedDataset(output) as tokens:
        files = ".bin, .idx and .json" if manifest else ".bin and .idx"
        print(
            f"{output}{files}: {len(prefixes):,} {'pair' if len(prefixes) == 1 else 'pairs'}, "
            f"{tokens.document_count:,} documents, {tokens.token_count:,} tokens"
        )
    return 0


class _Progress:
    """A line now and then on standard error, for merges that take longer than some seconds."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def report(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._said >= _PROGRESS_SECONDS:
            self._said = now
            print(f"{done / 1e9:,.2f} of {total / 1e9:,.2f} GB", file=sys.stderr, flush=True)

"""``llmctl data merge``: merge .bin/.idx datasets into one, as Megatron-LM's tools/merge_datasets.py does.

One large dataset opens faster than a thousand small ones, and counts as one source of a blend.
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
from trainer.config.formats.indexed_data import DTYPES
from trainer.data.errors import DataError
from trainer.data.indexed.index_format import CHUNK, files_of, named_prefixes
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.indexed.manifest import Manifest, manifest_path, read_manifest
from trainer.data.indexed.writer import IndexedDatasetWriter, remove_partials

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


def merge_datasets(
    prefixes: Sequence[Path], output: Path, report: Callable[[int, int], None] | None = None
) -> Manifest | None:
    """Write the documents of ``prefixes``, in this order, to the dataset ``output``.

    The output has a manifest if all inputs have one. Checksums of manifests are verified. Memory: some megabytes and,
    on systems that count mapped pages, one index.

    Args:
        prefixes: datasets to merge; all of one dtype, and those with manifests of one tokenizer.
        output: prefix to write; an earlier dataset stays until the new dataset is complete.
        report: called periodically with the bytes of tokens done and their total.

    Raises:
        DataError: a dataset is damaged, or the datasets do not match; nothing was written.
        OSError: the output cannot be written; partial output was removed.
    """
    sources = [_examine(prefix) for prefix in prefixes]
    _check_together(sources, output)
    merged = _merged_manifest(sources, output)
    # Remove partial files of a killed run, which may have filled the disk.
    remove_partials(output)
    _check_disk_space(sources, output)
    code = next(code for code, name in DTYPES.items() if np.dtype(name) == sources[0].dtype)
    total = sum(source.bin_bytes for source in sources)
    with IndexedDatasetWriter(output, code) as writer:

        def report_progress() -> None:
            if report is not None:
                report(writer.tokens * writer.dtype.itemsize, total)

        for source in sources:
            _copy(source, writer, report_progress)
        # An old manifest must never stand beside new tokens.
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
        raise DataError("--input: no .bin/.idx dataset to merge; name prefixes, or folders that hold datasets")
    first = sources[0]
    for source in sources:
        if os.path.realpath(files_of(source.prefix)[0]) == os.path.realpath(files_of(output)[0]):
            raise DataError(f"{output}: is one of the datasets to merge; write the result to another prefix")
        if source.dtype != first.dtype:
            raise DataError(
                f"{source.prefix}: has {source.dtype} tokens but {first.prefix} has {first.dtype}: they were made for "
                "different vocabularies; merge only datasets of one tokenizer"
            )


def _merged_manifest(sources: Sequence[_Source], output: Path) -> Manifest | None:
    manifests = [(source.prefix, source.manifest) for source in sources if source.manifest is not None]
    if not manifests:
        return None
    if len(manifests) < len(sources):
        without = next(source.prefix for source in sources if source.manifest is None)
        raise DataError(
            f"{without}: has no manifest, but {manifests[0][0]} has one, so they may be of different tokenizers; if "
            f"one tokenizer made both, move the manifests (.json) away, and {output} gets none"
        )
    prefix, first = manifests[0]
    for other, manifest in manifests:
        for name in ("tokenizer_sha256", "vocab_size", "eod"):
            mine, theirs = getattr(first, name), getattr(manifest, name)
            if mine != theirs:
                raise DataError(
                    f"{other}: was prepared with {name} {str(theirs)[:12]} but {prefix} with {str(mine)[:12]}; merge "
                    "only datasets that were prepared in the same way"
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


def _check_disk_space(sources: Sequence[_Source], output: Path) -> None:
    folder = next(folder for folder in output.absolute().parents if folder.is_dir())
    # The tables of the index are written to separate files first, and then concatenated.
    needed = sum(source.bin_bytes + 2 * source.idx_bytes for source in sources)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DataError(f"{folder}: has {free / 1e9:,.1f} GB free, but {output} takes {needed / 1e9:,.1f} GB")


def _copy(source: _Source, writer: IndexedDatasetWriter, report: Callable[[], None]) -> None:
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
        # Read the file instead of the mapping: pages of the mapping would count as our memory.
        with bin_file.open("rb") as file:
            # A partial token remains if another process truncates the file meanwhile.
            while (block := file.read(_BLOCK)) and len(block) % source.dtype.itemsize == 0:
                if has_checksums:
                    checksums[0].update(block)
                writer.append(np.frombuffer(block, source.dtype), _NONE, _NONE)
                report()
    if writer.tokens != expected_tokens:
        raise DataError(f"{bin_file}: was modified while it was read; merge again when nothing writes to it")
    if manifest is None or not has_checksums:
        return
    with idx_file.open("rb") as file:
        while block := file.read(_BLOCK):
            checksums[1].update(block)
    wanted = (manifest.bin_sha256, manifest.idx_sha256)
    for path, checksum, expected in zip((bin_file, idx_file), checksums, wanted, strict=True):
        if checksum.hexdigest() != expected:
            raise DataError(f"{path}: is damaged: its SHA-256 differs from its manifest's; prepare the dataset again")


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns 3, with one line of explanation, if the merge fails."""
    options = parse("merge", arguments)
    output = Path(options.output_prefix).expanduser()
    try:
        if options.output_prefix.endswith(os.sep) or output.name in ("", ".."):
            raise DataError(f"--output-prefix: {options.output_prefix or '.'} is a folder; append a dataset name")
        prefixes = named_prefixes(map(Path, options.input))
        manifest = merge_datasets(prefixes, output, _Progress().report)
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
            f"{output}{files}: {len(prefixes):,} {'dataset' if len(prefixes) == 1 else 'datasets'}, "
            f"{tokens.document_count:,} documents, {tokens.token_count:,} tokens"
        )
    return 0


class _Progress:
    """Progress lines on standard error, for merges that take longer than _PROGRESS_SECONDS."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def report(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._said >= _PROGRESS_SECONDS:
            self._said = now
            print(f"{done / 1e9:,.2f} of {total / 1e9:,.2f} GB", file=sys.stderr, flush=True)

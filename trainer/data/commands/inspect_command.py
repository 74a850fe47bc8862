"""``llmctl data inspect``: show the content of .bin/.idx datasets, and find damage."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from trainer.config.command_parser import print_text
from trainer.config.data_flags import parse
from trainer.config.records.json_text import json_text
from trainer.data.errors import DataError
from trainer.data.indexed.index_format import named_prefixes
from trainer.data.indexed.inspection import Inspection, Lengths, inspect_dataset
from trainer.data.tokenizers.factory import open_tokenizer
from trainer.data.tokenizers.settings import settings_from_flags

_BAR = 40
"""Width of the longest bar in characters."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns 3 for damaged data or an unreadable tokenizer."""
    options = parse("inspect", arguments)
    try:
        settings = settings_from_flags(options)
        tokenizer = open_tokenizer(settings) if settings.is_set else None
        if tokenizer is not None:
            tokenizer.decode([])  # loads the library now, so that its errors come before any data is read
        prefixes = named_prefixes(map(Path, options.input))
    except DataError as error:
        print(f"llmctl data inspect: {error}", file=sys.stderr)
        return 3
    found = [inspect_dataset(prefix, tokenizer, settings.name, options.samples, options.verify) for prefix in prefixes]
    if options.json:
        print_text(json_text({"pairs": [asdict(inspection) for inspection in found]}, indent=1))
    else:
        print_text("\n\n".join("\n".join(_describe(inspection)) for inspection in found))
    for problem in (problem for inspection in found for problem in inspection.problems):
        print(f"llmctl data inspect: {problem}", file=sys.stderr)
    return 3 if any(inspection.problems for inspection in found) else 0


def _describe(inspection: Inspection) -> Iterator[str]:
    yield inspection.prefix
    if inspection.dtype is None:
        yield "  cannot be opened"
        return
    empty = f", {inspection.empty_documents:,} of them empty" if inspection.empty_documents else ""
    yield f"  documents   {inspection.documents:,}{empty}"
    if inspection.sequences != inspection.documents - inspection.empty_documents:
        yield f"  sequences   {inspection.sequences:,}"
    yield f"  tokens      {inspection.tokens:,} of {inspection.dtype}, {_size(inspection.bin_bytes)}"
    yield f"  index       {_size(inspection.idx_bytes)}"
    yield from _describe_manifest(inspection)
    if inspection.lengths is not None:
        yield from _describe_lengths(inspection.lengths)
    yield from _describe_contents(inspection)
    for sample in inspection.samples:
        yield f"  document {sample.document:,}, {sample.tokens:,} tokens"
        shown = " ".join(map(str, sample.ids)) if sample.text is None else json.dumps(sample.text, ensure_ascii=False)
        yield f"    {shown}"


def _describe_manifest(inspection: Inspection) -> Iterator[str]:
    manifest = inspection.manifest
    if manifest is None:
        yield "  tokenizer   unknown: no manifest"
        return
    yield f"  tokenizer   sha256 {manifest.tokenizer_sha256[:12]}, {manifest.vocab_size:,} tokens"
    yield f"  ended by    {'nothing' if manifest.eod is None else f'token {manifest.eod}'}"
    if inspection.tokens:
        rate = manifest.text_bytes / inspection.tokens
        yield f"  text        {_size(manifest.text_bytes)}, {rate:.2f} bytes per token"


def _describe_contents(inspection: Inspection) -> Iterator[str]:
    contents = inspection.contents
    if contents is None:
        return
    yield f"  token ids   {contents.smallest_token} to {contents.largest_token}"
    if contents.ends is not None:
        yield f"  ends        {contents.ends:,}"
    yield f"  bin sha256  {contents.bin_sha256}"
    yield f"  idx sha256  {contents.idx_sha256}"
    if not contents.compared:
        yield "  checksums   none in the manifest to compare with"
    elif not inspection.problems:
        yield "  checksums   match the manifest"


def _describe_lengths(lengths: Lengths) -> Iterator[str]:
    percentiles = ", ".join(f"{percent}% {length:,}" for percent, length in lengths.percentiles.items())
    yield f"  lengths     {lengths.shortest:,} to {lengths.longest:,} tokens, mean {lengths.mean:,.1f}"
    yield f"  percentiles {percentiles}"
    most = max(part.documents for part in lengths.ranges)
    names = [f"{part.shortest:,} to {part.longest:,}" for part in lengths.ranges]
    width = max(map(len, names))
    yield f"    {'tokens':>{width}}  {'documents':>13}  {'their tokens':>17}"
    for name, part in zip(names, lengths.ranges, strict=True):
        bar = "#" * -(-_BAR * part.documents // most)
        yield f"    {name:>{width}}  {part.documents:>13,}  {part.tokens:>17,}  {bar}".rstrip()


def _size(count: int) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:,} bytes"

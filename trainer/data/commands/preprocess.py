"""``llmctl data prepare``: text to Megatron-LM's .bin/.idx and a manifest, by its preprocess_data.py's flags.

The implementation is in trainer.data.prepare.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from trainer.config.blends import DEFAULT_SPLIT, empty_split
from trainer.config.data_flags import parse
from trainer.data.errors import DataError
from trainer.data.indexed.index_format import dtype_code
from trainer.data.indexed.manifest import Manifest, manifest_path
from trainer.data.indexed.writer import IndexedDatasetWriter
from trainer.data.prepare.assembly import Assembled
from trainer.data.prepare.encoding import Recipe, batches, encode_documents
from trainer.data.prepare.inputs import find_inputs
from trainer.data.prepare.journal import folder_of
from trainer.data.prepare.node_status import TERMINATED, NodeStatusFiles, Terminated, raise_on_sigterm
from trainer.data.prepare.pipeline import Preparation, Unfinished, check, prepare
from trainer.data.tokenizers.settings import settings_from_flags
from trainer.data.tokenizers.tokenizer import Tokenizer


def tokenize_documents(texts: Iterable[str], tokenizer: Tokenizer, prefix: Path, append_eod: bool = True) -> Manifest:
    """Tokenize ``texts``, one document each, into the dataset ``prefix``, in this process.

    Raises:
        DataError: ``append_eod`` is set, and the tokenizer has no end-of-document token.
        OSError: the dataset cannot be written; partial output was removed.
    """
    if append_eod and tokenizer.eod is None:
        raise DataError("--append-eod: the tokenizer has no end-of-document token; name a token with --eod-token")
    recipe = Recipe(append_eod=append_eod)
    text_bytes, largest = 0, -1
    with IndexedDatasetWriter(prefix, dtype_code(tokenizer.vocab_size)) as writer:
        for batch in batches((text,) for text in texts):
            block = encode_documents([text for (text,) in batch], tokenizer, recipe)
            writer.append(block.tokens, block.lengths, block.ends)
            text_bytes += block.text_bytes
            largest = max(largest, int(block.tokens.max(initial=-1)))
        # An old manifest must never stand beside new tokens.
        manifest_path(prefix).unlink(missing_ok=True)
        checksums = writer.finish()
    manifest = Manifest(
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod if append_eod else None,
        documents=writer.documents,
        sequences=writer.sequences,
        tokens=writer.tokens,
        largest_token=largest,
        text_bytes=text_bytes,
        bin_sha256=checksums.bin_sha256,
        idx_sha256=checksums.idx_sha256,
    )
    manifest.write(prefix)
    return manifest


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns 3, with one line, if a file cannot be used."""
    options = parse("prepare", arguments)
    options.json_keys = options.json_keys or ["text"]
    try:
        with raise_on_sigterm():
            return _run(options)
    except Terminated:
        why = _node_status(options).wait_for_failure()
        return _fail(why or TERMINATED, _code(None if why else signal.SIGTERM))


def _run(options: argparse.Namespace) -> int:
    try:
        wanted = _wanted(options)
        if options.check:
            check(wanted)
            return 0
        assembled, facts = prepare(wanted)
    except Unfinished as error:
        parts = "1 part is" if error.kept == 1 else f"{error.kept:,} parts are"
        kept = f" ({parts} done and kept: run the same command again to continue)" if error.kept else ""
        return _fail(f"{error.reason}{kept}", _code(error.ended_by))
    except DataError as error:
        return _fail(str(error), 3)
    except OSError as error:
        return _fail(f"{options.output_prefix}: cannot be written: {error.strerror}", 3)
    except KeyboardInterrupt:
        return _fail("interrupted", _code(signal.SIGINT))
    if assembled is not None:
        _print_result(assembled, facts.notes)
    return 0


def _code(ended_by: signal.Signals | None) -> int:
    return 3 if ended_by is None else 128 + ended_by


def _fail(message: str, code: int) -> int:
    _say(message)
    return code


def _say(message: str) -> None:
    print(f"llmctl data prepare: {message}", file=sys.stderr)


def _node_status(options: argparse.Namespace) -> NodeStatusFiles:
    folder = folder_of(Path(options.output_prefix).expanduser())
    # --check must not write any file.
    nodes = 1 if options.check else options.nodes
    return NodeStatusFiles(folder, options.node, nodes, options.attempt)


def _wanted(options: argparse.Namespace) -> Preparation:
    if not 0 <= options.node < options.nodes:
        raise DataError(f"--node: {options.node} is not valid for --nodes {options.nodes}: nodes are numbered from 0")
    prefix = str(Path(options.output_prefix).expanduser())
    if options.output_prefix.endswith(os.sep) or Path(prefix).name in ("", ".."):
        raise DataError(
            f"--output-prefix: {options.output_prefix or '.'} is a folder; append a beginning for the file names in it"
        )
    if options.restart and options.nodes > 1:
        raise DataError(f"--restart: not possible with several nodes; remove {folder_of(Path(prefix))} instead")
    unfit = next((key for key in options.json_keys if os.sep in key or not key), None)
    if unfit is not None:
        raise DataError(f"--json-keys: {unfit!r} cannot be part of a file name, as each key must be")
    if options.nodes > 1 and not options.attempt:
        raise DataError("--attempt: give all nodes of one start the same name, and a different name at each start")
    with _node_status(options).reported_failure():
        inputs = find_inputs(options.input, _say if options.node == 0 else None)
    return Preparation(
        inputs=tuple(inputs),
        output_prefix=prefix,
        tokenizer=settings_from_flags(options),
        recipe=Recipe(
            tuple(dict.fromkeys(options.json_keys)), options.append_eod, options.split_sentences, options.keep_newlines
        ),
        text_document=options.text_document,
        skip_bad=options.on_error == "skip",
        processes=options.workers or _processors(),
        restart=options.restart,
        node=options.node,
        nodes=options.nodes,
        attempt=options.attempt,
        log_documents=options.log_interval,
    )


def _processors() -> int:
    # The cores of the job, if a scheduler has bound this process to some.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _print_result(assembled: Assembled, notes: Sequence[str]) -> None:
    for note in notes:
        print(f"llmctl data prepare: {note}", file=sys.stderr)
    for prefix, manifest in assembled.manifests:
        print(
            f"{prefix}.bin, .idx and .json: {manifest.documents:,} documents, {manifest.tokens:,} tokens, "
            f"{manifest.text_bytes / max(1, manifest.tokens):.2f} bytes per token"
        )
        problem = empty_split("valid", str(prefix), manifest.sequences, manifest.tokens, DEFAULT_SPLIT, sample=2)
        if problem:
            print(f"llmctl data prepare: {problem}", file=sys.stderr)
    if assembled.bad:
        named = "\n  ".join(assembled.first_bad)
        more = assembled.bad - len(assembled.first_bad)
        print(
            f"llmctl data prepare: {assembled.bad:,} documents were skipped:\n  {named}"
            + (f"\n  and {more:,} more" if more else ""),
            file=sys.stderr,
        )

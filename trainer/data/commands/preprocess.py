"""``llmctl data prepare``: text to Megatron-LM's .bin/.idx and a manifest, by its preprocess_data.py's flags.

What it does stands in trainer.data.prepare.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from trainer.config.data_flags import parse
from trainer.data.errors import DataError
from trainer.data.indexed.index_format import dtype_code
from trainer.data.indexed.manifest import Manifest, manifest_path
from trainer.data.indexed.writer import PairWriter
from trainer.data.prepare.assembly import Assembled
from trainer.data.prepare.encoding import Recipe, batches, encode_documents
from trainer.data.prepare.inputs import find_inputs
from trainer.data.prepare.journal import folder_of
from trainer.data.prepare.node_status import TERMINATED, NodeStatusFiles, Terminated, raise_on_sigterm
from trainer.data.prepare.pipeline import Preparation, Unfinished, check, prepare
from trainer.data.tokenizers.settings import settings_from_flags
from trainer.data.tokenizers.tokenizer import Tokenizer


def tokenize_documents(texts: Iterable[str], tokenizer: Tokenizer, prefix: Path, append_eod: bool = True) -> Manifest:
    """Tokenize ``texts``, one document each, into the pair of ``prefix``, in this process.

    Raises:
        DataError: an end-of-document token is wanted and the tokenizer has none.
        OSError: the pair cannot be written; nothing is left of it.
    """
    if append_eod and tokenizer.eod is None:
        raise DataError("--append-eod: the tokenizer has no end-of-document token; name one with --eod-token")
    recipe = Recipe(append_eod=append_eod)
    text_bytes, largest = 0, -1
    with PairWriter(prefix, dtype_code(tokenizer.vocab_size)) as writer:
        for batch in batches((text,) for text in texts):
            block = encode_documents([text for (text,) in batch], tokenizer, recipe)
            writer.append(block.tokens, block.lengths, block.ends)
            text_bytes += block.text_bytes
            largest = max(largest, int(block.tokens.max(initial=-1)))
        # Never an old manifest beside new tokens.
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
    """Run the command; 3 if an input, the tokenizer or the output cannot be used, with one line that says which."""
    options = parse("prepare", arguments)
    options.json_keys = options.json_keys or ["text"]
    try:
        with raise_on_sigterm():
            return _run(options)
    except Terminated:
        why = _marks(options).wait_for_failure()
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
        kept = f" ({parts} done and kept: the same command goes on from there)" if error.kept else ""
        return _fail(f"{error.reason}{kept}", _code(error.ended_by))
    except DataError as error:
        return _fail(str(error), 3)
    except OSError as error:
        return _fail(f"{options.output_prefix}: cannot be written: {error.strerror}", 3)
    except KeyboardInterrupt:
        return _fail("interrupted", _code(signal.SIGINT))
    if assembled is not None:
        _tell(assembled, facts.notes)
    return 0


def _code(ended_by: signal.Signals | None) -> int:
    return 3 if ended_by is None else 128 + ended_by


def _fail(message: str, code: int) -> int:
    _say(message)
    return code


def _say(message: str) -> None:
    print(f"llmctl data prepare: {message}", file=sys.stderr)


def _marks(options: argparse.Namespace) -> NodeStatusFiles:
    folder = folder_of(Path(options.output_prefix).expanduser())
    # A look at what is there writes nothing.
    nodes = 1 if options.check else options.nodes
    return NodeStatusFiles(folder, options.node, nodes, options.attempt)


def _wanted(options: argparse.Namespace) -> Preparation:
    if not 0 <= options.node < options.nodes:
        raise DataError(f"--node: {options.node} is not one of {options.nodes}: they are numbered from 0")
    prefix = str(Path(options.output_prefix).expanduser())
    if options.output_prefix.endswith(os.sep) or Path(prefix).name in ("", ".."):
        raise DataError(
            f"--output-prefix: {options.output_prefix or '.'} is a folder; add how the names in it shall begin"
        )
    if options.restart and options.nodes > 1:
        raise DataError(f"--restart: several nodes would undo each other's work; remove {folder_of(Path(prefix))}")
    unfit = next((key for key in options.json_keys if os.sep in key or not key), None)
    if unfit is not None:
        raise DataError(f"--json-keys: {unfit!r} cannot be part of a file's name, which each key is")
    if options.nodes > 1 and not options.attempt:
        raise DataError("--attempt: give all nodes of one start the same name, and another one at each start")
    with _marks(options).told():
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
    # Those of a job, where a scheduler has bound us to some.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tell(assembled: Assembled, notes: Sequence[str]) -> None:
    for note in notes:
        print(f"llmctl data prepare: {note}", file=sys.stderr)
    for prefix, manifest in assembled.manifests:
        print(
            f"{prefix}.bin, .idx and .json: {manifest.documents:,} documents, {manifest.tokens:,} tokens, "
            f"{manifest.text_bytes / max(1, manifest.tokens):.2f} bytes per token"
        )
    if assembled.bad:
        named = "\n  ".join(assembled.first_bad)
        more = assembled.bad - len(assembled.first_bad)
        print(
            f"llmctl data prepare: {assembled.bad:,} documents were passed over:\n  {named}"
            + (f"\n  and {more:,} more" if more else ""),
            file=sys.stderr,
        )

"""One preparation from beginning to end, on one or several nodes.

Several nodes must share a file system.
"""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from trainer.data.errors import DataError
from trainer.data.indexed.index_format import files_of
from trainer.data.indexed.manifest import manifest_path
from trainer.data.prepare.assembly import Assembled, assemble
from trainer.data.prepare.chunk_work import ChunkWork, do_chunk
from trainer.data.prepare.chunks import Chunk, TextDocument, check_unchanged, chunk_bytes, cut_chunks
from trainer.data.prepare.compression import open_bytes, reading_errors
from trainer.data.prepare.encoding import Recipe
from trainer.data.prepare.inputs import InputFile, means_one_of
from trainer.data.prepare.journal import Journal, Plan, folder_of
from trainer.data.prepare.node_status import TERMINATED, NodeStatusFiles, Terminated
from trainer.data.prepare.nodes import is_late, wait_for_nodes
from trainer.data.prepare.part_file import Footer
from trainer.data.prepare.progress import Progress, say
from trainer.data.prepare.workers import TokenizerFacts, do_chunks, learn_facts, learn_facts_elsewhere, open_same
from trainer.data.tokenizers.factory import open_tokenizer
from trainer.data.tokenizers.settings import TokenizerSettings
from trainer.data.tokenizers.tokenizer import Tokenizer

IN_THIS_PROCESS = 1 << 20
"""Smaller inputs are encoded in this process, sooner than a process could start."""
LARGEST_TEXT_FILE = 256 << 20
_FIRST_LINE = 1 << 16
_LONGEST_NAME = 255
_COMPRESSED = 4
"""Assumed ratio of a compressed text's size to the file's size, to choose the number of processes."""


@dataclass(frozen=True)
class Preparation:
    """Options of a preparation.

    Attributes:
        inputs: input files.
        output_prefix: prefix of the datasets; each key adds ``_KEY_document`` or ``_KEY_sentence``.
        tokenizer: settings of the tokenizer.
        recipe: conversion of a document to sequences.
        text_document: unit of plain text that makes a document; None for the file, if it is not very large.
        skip_bad: skip bad documents.
        processes: number of processes that encode at the same time.
        restart: discard the work of an earlier, unfinished preparation.
        node: number of this node among ``nodes``.
        nodes: number of nodes at work, each with every ``nodes``-th chunk; node 0 merges the part files.
        attempt: the same on all nodes, and different for each start of the nodes; "" on one node.
        log_documents: see Progress.
    """

    inputs: tuple[InputFile, ...]
    output_prefix: str
    tokenizer: TokenizerSettings
    recipe: Recipe = Recipe()
    text_document: TextDocument | None = None
    skip_bad: bool = False
    processes: int = 1
    restart: bool = False
    node: int = 0
    nodes: int = 1
    attempt: str = ""
    log_documents: int = 0

    @property
    def prefixes(self) -> list[Path]:
        """Prefix of each key's dataset."""
        level = "sentence" if self.recipe.sentences else "document"
        return [Path(f"{self.output_prefix}_{key}_{level}") for key in self.recipe.keys]


class Unfinished(Exception):
    """A preparation ended early.

    Finished chunks are kept, and the same call resumes from them.

    Attributes:
        reason: one sentence.
        kept: number of finished chunks.
        ended_by: signal that requested the end; None after an error.
    """

    def __init__(self, reason: str, kept: int, ended_by: signal.Signals | None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kept = kept
        self.ended_by = ended_by


def check(wanted: Preparation) -> None:
    """Check before the work begins all that can be wrong; writes nothing.

    Raises:
        DataError: the tokenizer, an input or the output's folder cannot be used, or an unfinished preparation has
            other options.
    """
    _check_output(wanted)
    _check_text_files(wanted)
    journal = Journal(Path(wanted.output_prefix), _plan(wanted, open_tokenizer(wanted.tokenizer)), wanted.restart)
    folder = next(place for place in Path(wanted.output_prefix).absolute().parents if place.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise DataError(f"{wanted.output_prefix}: cannot be written: {folder} is not a folder with write permission")
    refusal = journal.refusal()
    if refusal is not None:
        raise DataError(refusal)


def prepare(wanted: Preparation) -> tuple[Assembled | None, TokenizerFacts]:
    """Make the datasets; returns None as the result on nodes after the first.

    Memory of each process: the tokenizer and some megabytes; a few times the longest document, if that is larger.

    Raises:
        DataError: the tokenizer or an input cannot be used, or an unfinished preparation has other options.
        OSError: the output's folder cannot be created.
        Unfinished: the work has begun, and ended early.
        Terminated: SIGTERM before the work began, within raise_on_sigterm.
    """
    _check_output(wanted)
    node_status = NodeStatusFiles(folder_of(Path(wanted.output_prefix)), wanted.node, wanted.nodes, wanted.attempt)
    with node_status.reported_failure():
        _check_text_files(wanted)
        # For little text, another process costs more than the work.
        is_small = sum(file.size for file in wanted.inputs) <= IN_THIS_PROCESS
        facts = (learn_facts if is_small else learn_facts_elsewhere)(wanted.tokenizer)
        plan = _plan(wanted, facts)
    journal = Journal(Path(wanted.output_prefix), plan, wanted.restart, node_status)
    # Node 0 has joined the parts and removed the journal while this node waited for its start.
    if wanted.node > 0 and is_late(journal, plan, wanted.prefixes):
        say(f"{wanted.output_prefix}: is already finished; node {wanted.node} has nothing to do")
        return None, facts
    with journal.held():
        try:
            return _work(wanted, plan, facts, journal, is_small), facts
        except Terminated:
            why = node_status.wait_for_failure()
            raise Unfinished(why or TERMINATED, journal.leave(), None if why else signal.SIGTERM) from None
        except BaseException as error:
            reason = _reason(error, wanted)
            node_status.fail(reason or type(error).__name__)
            if reason is None:
                raise
            ended_by = signal.SIGINT if isinstance(error, KeyboardInterrupt) else None
            raise Unfinished(reason, journal.leave(), ended_by) from None


def _reason(error: BaseException, wanted: Preparation) -> str | None:
    """Return one sentence for the user; None for an internal error."""
    if isinstance(error, DataError):
        return str(error)
    if isinstance(error, OSError):
        remedy = "; free space on its disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"{wanted.output_prefix}: cannot be written: {error.strerror or error}{remedy}"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else None


def _work(wanted: Preparation, plan: Plan, facts: TokenizerFacts, journal: Journal, is_small: bool) -> Assembled | None:
    chunks = _encode(wanted, plan, facts, journal, is_small)
    if wanted.nodes > 1:
        journal.node_status.arrive()
        if wanted.node > 0:
            return None
    with Progress(len(chunks)) as progress:
        if wanted.nodes > 1:
            wait_for_nodes(journal, len(chunks), lambda done, reason: progress.waiting(done, len(chunks), reason))
        check_unchanged(wanted.inputs)
        assembled = assemble(
            journal, plan, chunks, wanted.prefixes, wanted.skip_bad, lambda done: progress.merging(done, len(chunks))
        )
    journal.remove()
    return assembled


def _check_output(wanted: Preparation) -> None:
    """Reject outputs that would fail only at the end."""
    if Path(wanted.output_prefix).name in ("", ".."):
        raise DataError(
            f"--output-prefix: {wanted.output_prefix or '.'} is a folder; append a beginning for the file names in it"
        )
    if "\0" in wanted.output_prefix:
        raise DataError(f"--output-prefix: {wanted.output_prefix!r} holds a NUL byte, which no file name can hold")
    folder = folder_of(Path(wanted.output_prefix))
    if folder.exists() and not folder.is_dir():
        raise DataError(f"--output-prefix: {folder} is a file, but unfinished work is kept in a folder of that name")
    for key, prefix in zip(wanted.recipe.keys, wanted.prefixes, strict=True):
        if os.sep in key or not key:
            raise DataError(f"--json-keys: {key!r} cannot be part of a file name, as each key must be")
        for path in (*files_of(prefix), manifest_path(prefix)):
            length = len(os.fsencode(path.name))
            if length > _LONGEST_NAME:
                raise DataError(
                    f"--output-prefix: {path.name} would have {length} bytes, but a file name at most {_LONGEST_NAME}"
                )
            if path.is_dir():
                raise DataError(f"--output-prefix: {path} is a folder; remove it, or choose another prefix")
            if means_one_of(path, wanted.inputs):
                raise DataError(f"--output-prefix: {path} is an input, and would be lost; choose another prefix")


def _check_text_files(wanted: Preparation) -> None:
    """Reject plain text that probably needs --text-document, unless the option is given."""
    if wanted.text_document is not None:
        return
    texts = [file for file in wanted.inputs if file.kind == "text"]
    large = next((file for file in texts if file.size > LARGEST_TEXT_FILE), None)
    if large is not None:
        raise DataError(
            f"{large.path}: is plain text of {large.size / 1e6:,.0f} MB, and would be one document; choose the unit "
            "of a document: --text-document line, paragraph (between blank lines) or file"
        )
    # Check one file of each ending: the others are probably alike.
    each = {Path(file.path).suffix: file.path for file in reversed(texts)}
    lines = next((path for path in each.values() if _begins_with_json(path, wanted.recipe.keys)), None)
    if lines is not None:
        raise DataError(
            f"{lines}: begins like JSON lines, but only .jsonl, .json and .ndjson are read as JSON lines; rename it, "
            "or choose --text-document file if it is plain text"
        )


def _begins_with_json(path: str, keys: Sequence[str]) -> bool:
    try:
        with open_bytes(path) as stream:
            line = stream.readline(_FIRST_LINE).lstrip()
    except reading_errors():
        return False  # reading reports the error later
    if not line.startswith(b"{"):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):  # a long line is truncated
        return any(json.dumps(key).encode() in line for key in keys)
    return True


def _plan(wanted: Preparation, tokenizer: TokenizerFacts | Tokenizer) -> Plan:
    if wanted.recipe.append_eod and tokenizer.eod is None:
        raise DataError("--append-eod: the tokenizer has no end-of-document token; name a token with --eod-token")
    return Plan(
        tokenizer.sha256,
        tokenizer.vocab_size,
        tokenizer.eod if wanted.recipe.append_eod else None,
        wanted.recipe,
        wanted.text_document or "file",
        chunk_bytes(wanted.inputs),
        wanted.inputs,
    )


def _encode(
    wanted: Preparation, plan: Plan, facts: TokenizerFacts, journal: Journal, is_small: bool
) -> Sequence[Chunk]:
    """Encode this node's unfinished chunks; return all chunks of all nodes, without their content."""
    known: list[Chunk] = []
    done = journal.done()
    work = ChunkWork(journal.parts, wanted.recipe, plan.text_document, wanted.skip_bad)
    total = sum(file.size for file in wanted.inputs)
    with Progress(total // wanted.nodes, documents=wanted.log_documents) as progress:

        def to_do() -> Iterator[Chunk]:
            ours = 0
            for chunk in cut_chunks(wanted.inputs, plan.chunk_bytes, plan.text_document):
                journal.node_status.beat()
                known.append(Chunk(chunk.number, chunk.spans, chunk.input_bytes))
                if chunk.number % wanted.nodes != wanted.node:
                    continue
                ours += chunk.input_bytes
                if chunk.number in done:
                    progress.skip(chunk.input_bytes)
                else:
                    yield chunk
            progress.expect(ours)

        processes = 0 if is_small else min(wanted.processes, 1 + _COMPRESSED * total // plan.chunk_bytes)
        with closing(_do(to_do(), work, facts, processes, journal.node_status.beat)) as results:
            for chunk, footer in results:
                progress.advance(chunk.input_bytes, footer.documents)
    return known


def _do(
    chunks: Iterator[Chunk], work: ChunkWork, facts: TokenizerFacts, processes: int, beat: Callable[[], None]
) -> Generator[tuple[Chunk, Footer], None, None]:
    if processes:
        yield from do_chunks(chunks, work, facts, processes, beat)
        return
    tokenizer = open_same(facts)
    for chunk in chunks:
        yield chunk, do_chunk(chunk, work, tokenizer)

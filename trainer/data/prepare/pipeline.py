"""One preparation from beginning to end, on one node or several that share a file system."""

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
from trainer.data.prepare.encoding import Recipe
from trainer.data.prepare.inputs import InputFile, means_one_of, open_bytes, reading_errors
from trainer.data.prepare.journal import Journal, Plan, folder_of
from trainer.data.prepare.node_status import TOLD_TO_END, NodeMarks, ToldToEnd
from trainer.data.prepare.nodes import is_late, wait_for_nodes
from trainer.data.prepare.part_file import Footer
from trainer.data.prepare.progress import Progress, say
from trainer.data.prepare.workers import TokenizerFacts, do_chunks, learn_facts, learn_facts_elsewhere, open_same
from trainer.data.tokenizers.factory import open_tokenizer
from trainer.data.tokenizers.settings import TokenizerSettings
from trainer.data.tokenizers.tokenizer import Tokenizer

IN_THIS_PROCESS = 1 << 20
"""So much input is sooner encoded than a process is started."""
LARGEST_TEXT_FILE = 256 << 20
_FIRST_LINE = 1 << 16
_LONGEST_NAME = 255
_COMPRESSED = 4
"""So many times its size a compressed text may have: enough processes for it."""


@dataclass(frozen=True)
class Preparation:
    """What is asked for.

    Attributes:
        inputs: the files.
        output_prefix: of the pairs; each key's adds ``_KEY_document`` or ``_KEY_sentence``.
        tokenizer: what to open.
        recipe: what is made of a document.
        text_document: what is a document in plain text; None: the file, if it is not very large.
        skip_bad: pass over what is no document.
        processes: that encode at the same time.
        restart: throw away what an earlier, unfinished one has done.
        node: our number among ``nodes``.
        nodes: that work on it at the same time, each with every ``nodes``-th chunk; number 0 puts them together.
        attempt: the same on all nodes, and another one each time that they are started; "": there is one node.
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
        """The pair of each key."""
        level = "sentence" if self.recipe.sentences else "document"
        return [Path(f"{self.output_prefix}_{key}_{level}") for key in self.recipe.keys]


class Unfinished(Exception):
    """It ended before it was done. What is done is kept, and the same call goes on from there.

    Attributes:
        reason: one sentence.
        kept: how many chunks are done.
        ended_by: the signal by which somebody wanted it to end; None: something is wrong.
    """

    def __init__(self, reason: str, kept: int, ended_by: signal.Signals | None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kept = kept
        self.ended_by = ended_by


def check(wanted: Preparation) -> None:
    """Look at all that can be known to be wrong before the work begins; writes nothing.

    Raises:
        DataError: the tokenizer, an input or the output's folder cannot be used, or an unfinished preparation is of
            other ones.
    """
    _check_output(wanted)
    _check_text_files(wanted)
    journal = Journal(Path(wanted.output_prefix), _plan(wanted, open_tokenizer(wanted.tokenizer)), wanted.restart)
    folder = next(place for place in Path(wanted.output_prefix).absolute().parents if place.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise DataError(f"{wanted.output_prefix}: cannot be written: {folder} is no folder that may be written to")
    refusal = journal.refusal()
    if refusal is not None:
        raise DataError(refusal)


def prepare(wanted: Preparation) -> tuple[Assembled | None, TokenizerFacts]:
    """Make the pairs; what came of it, or None on a node other than the first.

    Memory of each process: the tokenizer's, and some megabytes; a few times the longest document, if that is longer.

    Raises:
        DataError: the tokenizer or an input cannot be used, or an unfinished preparation is another one.
        OSError: the output's folder cannot be made.
        Unfinished: the work has begun, and could not be ended.
        ToldToEnd: before it has begun, where heeding_sigterm is in force.
    """
    _check_output(wanted)
    marks = NodeMarks(folder_of(Path(wanted.output_prefix)), wanted.node, wanted.nodes, wanted.attempt)
    with marks.told():
        _check_text_files(wanted)
        is_small = sum(file.size for file in wanted.inputs) <= IN_THIS_PROCESS
        facts = (learn_facts if is_small else learn_facts_elsewhere)(wanted.tokenizer)
        plan = _plan(wanted, facts)
    journal = Journal(Path(wanted.output_prefix), plan, wanted.restart, marks)
    if wanted.node > 0 and is_late(journal, plan, wanted.prefixes):
        say(f"{wanted.output_prefix}: is finished already; there is nothing left for node {wanted.node}")
        return None, facts
    with journal.held():
        try:
            return _work(wanted, plan, facts, journal, is_small), facts
        except ToldToEnd:
            why = marks.why_told_to_end()
            raise Unfinished(why or TOLD_TO_END, journal.leave(), None if why else signal.SIGTERM) from None
        except BaseException as error:
            reason = _reason(error, wanted)
            marks.fail(reason or type(error).__name__)
            if reason is None:
                raise
            ended_by = signal.SIGINT if isinstance(error, KeyboardInterrupt) else None
            raise Unfinished(reason, journal.leave(), ended_by) from None


def _reason(error: BaseException, wanted: Preparation) -> str | None:
    """One sentence for the user; None: it is none of his business."""
    if isinstance(error, DataError):
        return str(error)
    if isinstance(error, OSError):
        remedy = "; make room on its disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"{wanted.output_prefix}: cannot be written: {error.strerror or error}{remedy}"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else None


def _work(wanted: Preparation, plan: Plan, facts: TokenizerFacts, journal: Journal, is_small: bool) -> Assembled | None:
    chunks = _encode(wanted, plan, facts, journal, is_small)
    if wanted.nodes > 1:
        journal.marks.arrive()
        if wanted.node > 0:
            return None
    with Progress(len(chunks)) as progress:
        if wanted.nodes > 1:
            wait_for_nodes(journal, len(chunks), lambda done, reason: progress.waiting(done, len(chunks), reason))
        check_unchanged(wanted.inputs)
        assembled = assemble(
            journal, plan, chunks, wanted.prefixes, wanted.skip_bad, lambda done: progress.joining(done, len(chunks))
        )
    journal.remove()
    return assembled


def _check_output(wanted: Preparation) -> None:
    """Refuse what could only fail when all is done."""
    if Path(wanted.output_prefix).name in ("", ".."):
        raise DataError(
            f"--output-prefix: {wanted.output_prefix or '.'} is a folder; add how the names in it shall begin"
        )
    if "\0" in wanted.output_prefix:
        raise DataError(f"--output-prefix: {wanted.output_prefix!r} holds a NUL byte, which no file's name can")
    folder = folder_of(Path(wanted.output_prefix))
    if folder.exists() and not folder.is_dir():
        raise DataError(f"--output-prefix: {folder} is a file, and unfinished work is kept in a folder of that name")
    for key, prefix in zip(wanted.recipe.keys, wanted.prefixes, strict=True):
        if os.sep in key or not key:
            raise DataError(f"--json-keys: {key!r} cannot be part of a file's name, which each key is")
        for path in (*files_of(prefix), manifest_path(prefix)):
            length = len(os.fsencode(path.name))
            if length > _LONGEST_NAME:
                raise DataError(
                    f"--output-prefix: {path.name} would have {length} bytes, and a file's name at most {_LONGEST_NAME}"
                )
            if path.is_dir():
                raise DataError(f"--output-prefix: {path} is a folder; remove it, or choose other names")
            if means_one_of(path, wanted.inputs):
                raise DataError(f"--output-prefix: {path} is one of the inputs, and would be lost; choose other names")


def _check_text_files(wanted: Preparation) -> None:
    """Refuse what is hardly meant, unless it is said what a document is."""
    if wanted.text_document is not None:
        return
    texts = [file for file in wanted.inputs if file.kind == "text"]
    large = next((file for file in texts if file.size > LARGEST_TEXT_FILE), None)
    if large is not None:
        raise DataError(
            f"{large.path}: is plain text of {large.size / 1e6:,.0f} MB, and would be one document; say what is one: "
            "--text-document line, paragraph (between blank lines) or file"
        )
    # One of each ending: the others are likely to be like it.
    each = {Path(file.path).suffix: file.path for file in reversed(texts)}
    lines = next((path for path in each.values() if _begins_with_json(path, wanted.recipe.keys)), None)
    if lines is not None:
        raise DataError(
            f"{lines}: begins as JSON lines do, but only .jsonl, .json and .ndjson are read so; rename it, or "
            "say --text-document file if it is plain text"
        )


def _begins_with_json(path: str, keys: Sequence[str]) -> bool:
    try:
        with open_bytes(path) as stream:
            line = stream.readline(_FIRST_LINE).lstrip()
    except reading_errors():
        return False  # which is said when it is read
    if not line.startswith(b"{"):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):  # a long line is cut
        return any(json.dumps(key).encode() in line for key in keys)
    return True


def _plan(wanted: Preparation, tokenizer: TokenizerFacts | Tokenizer) -> Plan:
    if wanted.recipe.append_eod and tokenizer.eod is None:
        raise DataError("--append-eod: the tokenizer has no end-of-document token; name one with --eod-token")
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
    """Do our chunks that are not done; gives all there are, without their content."""
    known: list[Chunk] = []
    done = journal.done()
    work = ChunkWork(journal.parts, wanted.recipe, plan.text_document, wanted.skip_bad)
    total = sum(file.size for file in wanted.inputs)
    with Progress(total // wanted.nodes, documents=wanted.log_documents) as progress:

        def to_do() -> Iterator[Chunk]:
            ours = 0
            for chunk in cut_chunks(wanted.inputs, plan.chunk_bytes, plan.text_document):
                journal.marks.beat()
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
        with closing(_do(to_do(), work, facts, processes, journal.marks.beat)) as results:
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

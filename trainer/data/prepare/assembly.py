"""Assembly of part files to the datasets of all keys, renamed only when complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.errors import DataError
from trainer.data.indexed.index_format import dtype_code
from trainer.data.indexed.manifest import Manifest
from trainer.data.prepare.chunk_work import MAX_NAMED, token_dtype
from trainer.data.prepare.chunks import Chunk
from trainer.data.prepare.encoding import Block
from trainer.data.prepare.journal import Journal, Plan
from trainer.data.prepare.merge import Merger, MergeState, put_in_place
from trainer.data.prepare.part_file import DamagedPartFileError, Footer, open_part_file


@dataclass
class Assembled:
    """Result of a preparation.

    Attributes:
        manifests: prefix and manifest of each key's dataset.
        documents: number of documents in each dataset.
        bad: number of skipped documents.
        first_bad: first skipped documents, with place and reason.
    """

    manifests: list[tuple[Path, Manifest]] = field(default_factory=list)
    documents: int = 0
    bad: int = 0
    first_bad: list[str] = field(default_factory=list)


def assemble(
    journal: Journal,
    plan: Plan,
    chunks: Sequence[Chunk],
    prefixes: Sequence[Path],
    skip_bad: bool,
    report: Callable[[int], None],
) -> Assembled:
    """Write the dataset of every key from the part files of ``chunks``, then rename.

    Memory: some megabytes.
    A part file is removed soon after it is merged. After a kill at any point, the next call continues the merge.

    Args:
        journal: journal with all part files.
        plan: plan of the preparation.
        chunks: all chunks.
        prefixes: prefixes of the datasets, one per key.
        skip_bad: allow skipped documents.
        report: called after each chunk, with the number of merged chunks.

    Raises:
        DataError: a part file is damaged or has skipped documents, or no part file holds a token.
        OSError: the output cannot be written; earlier output is kept.
    """
    dtype = token_dtype(plan.vocab_size)
    with Merger(journal.parts, dtype_code(plan.vocab_size), prefixes) as merger:
        state = merger.state
        for done, chunk in enumerate(chunks[state.chunks :], state.chunks + 1):
            _reject_bad(state, skip_bad)
            part_file = journal.part_file(chunk.number)
            with _undamaged(part_file, dtype) as (footer, blocks):
                _note_bad(state, chunk, footer)
                _reject_bad(state, skip_bad)
                for key, block in blocks:
                    merger.tables[key].append(block.tokens, block.lengths, block.ends)
            _add(state.footer, footer)
            merger.add(part_file.stat().st_size)
            report(done)
        _reject_bad(state, skip_bad)
        finished = _finish(merger, plan) if any(tables.tokens for tables in merger.tables) else []
    if not finished:
        # After the merge's files are closed: NFS keeps the names of open files.
        raise _nothing(journal, plan, state.named, state.footer.bad)
    for (inside, _), prefix in zip(finished, prefixes, strict=True):
        put_in_place(inside, prefix)
    manifests = [(prefix, manifest) for prefix, (_, manifest) in zip(prefixes, finished, strict=True)]
    return Assembled(manifests, state.footer.documents, state.footer.bad, state.named)


def _finish(merger: Merger, plan: Plan) -> list[tuple[Path, Manifest]]:
    """Write index and manifest of every key; return each temporary prefix and manifest."""
    footer = merger.state.footer
    finished = []
    for key, (inside, checksums) in enumerate(merger.finish()):
        tables = merger.tables[key]
        manifest = Manifest(
            plan.tokenizer_sha256,
            plan.vocab_size,
            plan.eod,
            tables.documents,
            tables.sequences,
            tables.tokens,
            footer.largest[key],
            footer.text_bytes[key],
            *checksums,
        )
        manifest.write(inside)
        finished.append((inside, manifest))
    return finished


def _note_bad(state: MergeState, chunk: Chunk, footer: Footer) -> None:
    """Add the skipped documents of a chunk, with line numbers in whole files.

    Chunks come in output order.
    """
    for place, span in enumerate(chunk.spans):
        if span.start == 0:
            state.lines = 0
        for _, line, problem in (bad for bad in footer.first_bad if bad[0] == place):
            if len(state.named) < MAX_NAMED:
                at = "" if line is None else f":{state.lines + line}"
                state.named.append(f"{span.path}{at}: {problem}")
        state.lines += footer.lines[place] if place < len(footer.lines) else 0


def _reject_bad(state: MergeState, skip_bad: bool) -> None:
    """Reject documents that an earlier run has skipped, unless this run skips them, too."""
    if state.named and not skip_bad:
        raise DataError(state.named[0])


def _nothing(journal: Journal, plan: Plan, named: Sequence[str], bad: int) -> DataError:
    """Discard the journal, and return the error for an input without text.

    Without the journal other input is not rejected.
    """
    journal.discard()
    files = f"{plan.inputs[0].path}{f' and {len(plan.inputs) - 1:,} more' if len(plan.inputs) > 1 else ''}"
    why = (
        f"{bad:,} {'document was' if bad == 1 else 'documents were'} skipped, the first is {named[0]}"
        if bad
        else f"all documents of {files} are empty; give other files, or other --json-keys"
    )
    return DataError(f"there is no text in the input: {why}")


@contextmanager
def _undamaged(path: Path, dtype: np.dtype[Any]) -> Iterator[tuple[Footer, Iterator[tuple[int, Block]]]]:
    """Open a part file; remove a damaged one, to be made again."""
    try:
        with open_part_file(path, dtype) as opened:
            yield opened
    except DamagedPartFileError as error:
        path.unlink(missing_ok=True)
        raise DataError(f"{error}, and was removed; run the same command again to make a new one") from None


def _add(total: Footer, footer: Footer) -> None:
    total.documents += footer.documents
    total.sequences += footer.sequences
    total.bad += footer.bad
    total.text_bytes = [ours + more for ours, more in zip(total.text_bytes, footer.text_bytes, strict=True)]
    total.largest = [max(ours, more) for ours, more in zip(total.largest, footer.largest, strict=True)]

"""From the shards of all chunks to the pairs of all keys, put in place only when they are whole."""

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
from trainer.data.prepare.chunk_work import MOST_NAMED, token_dtype
from trainer.data.prepare.chunks import Chunk
from trainer.data.prepare.encoding import Block
from trainer.data.prepare.journal import Journal, Plan
from trainer.data.prepare.merge import Joining, JoinState, put_in_place
from trainer.data.prepare.part_file import DamagedShardError, Footer, open_shard


@dataclass
class Assembled:
    """What came of it.

    Attributes:
        manifests: prefix of each key's pair, and what is known of it.
        documents: in each pair.
        bad: how many were passed over.
        first_bad: the first of them: where, and what is wrong.
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
    """Write the pair of every key from the shards of ``chunks``, and put all of them in place. Memory: some megabytes.

    A shard is removed soon after it is joined. Ended at any instant, the next call goes on with what is joined.

    Args:
        journal: which has all the shards.
        plan: of the preparation.
        chunks: all of them.
        prefixes: one per key.
        skip_bad: documents that were passed over are allowed.
        report: called after each chunk, with how many are done.

    Raises:
        DataError: a shard is damaged, or holds documents that were passed over, or none holds a token.
        OSError: the output cannot be written; what was there before still is.
    """
    dtype = token_dtype(plan.vocab_size)
    with Joining(journal.parts, dtype_code(plan.vocab_size), prefixes) as joining:
        state = joining.state
        for done, chunk in enumerate(chunks[state.chunks :], state.chunks + 1):
            _check_bad(state, skip_bad)
            shard = journal.shard(chunk.number)
            with _undamaged(shard, dtype) as (footer, blocks):
                _note_bad(state, chunk, footer)
                _check_bad(state, skip_bad)
                for key, block in blocks:
                    joining.pairs[key].append(block.tokens, block.lengths, block.ends)
            _add(state.footer, footer)
            joining.add(shard.stat().st_size)
            report(done)
        _check_bad(state, skip_bad)
        finished = _finish(joining, plan) if any(pair.tokens for pair in joining.pairs) else []
    if not finished:
        # Not before what is removed with it is closed: NFS keeps the names of open files.
        raise _nothing(journal, plan, state.named, state.footer.bad)
    for (inside, _), prefix in zip(finished, prefixes, strict=True):
        put_in_place(inside, prefix)
    manifests = [(prefix, manifest) for prefix, (_, manifest) in zip(prefixes, finished, strict=True)]
    return Assembled(manifests, state.footer.documents, state.footer.bad, state.named)


def _finish(joining: Joining, plan: Plan) -> list[tuple[Path, Manifest]]:
    """Write index and manifest of every key; gives where each lies, whole, but not yet in place."""
    footer = joining.state.footer
    finished = []
    for key, (inside, checksums) in enumerate(joining.finish()):
        pair = joining.pairs[key]
        manifest = Manifest(
            plan.tokenizer_sha256,
            plan.vocab_size,
            plan.eod,
            pair.documents,
            pair.sequences,
            pair.tokens,
            footer.largest[key],
            footer.text_bytes[key],
            *checksums,
        )
        manifest.write(inside)
        finished.append((inside, manifest))
    return finished


def _note_bad(state: JoinState, chunk: Chunk, footer: Footer) -> None:
    """Line numbers in whole files, from those of spans in the order of the output."""
    for place, span in enumerate(chunk.spans):
        if span.start == 0:
            state.lines = 0
        for _, line, problem in (bad for bad in footer.first_bad if bad[0] == place):
            if len(state.named) < MOST_NAMED:
                at = "" if line is None else f":{state.lines + line}"
                state.named.append(f"{span.path}{at}: {problem}")
        state.lines += footer.lines[place] if place < len(footer.lines) else 0


def _check_bad(state: JoinState, skip_bad: bool) -> None:
    """Refuse documents that an earlier run has passed over, where this one is not to."""
    if state.named and not skip_bad:
        raise DataError(state.named[0])


def _nothing(journal: Journal, plan: Plan, named: Sequence[str], bad: int) -> DataError:
    """What to say where there is no text; what is done goes, that another input is not refused because of it."""
    journal.discard()
    files = f"{plan.inputs[0].path}{f' and {len(plan.inputs) - 1:,} more' if len(plan.inputs) > 1 else ''}"
    why = (
        f"{bad:,} {'document was' if bad == 1 else 'documents were'} passed over, the first {named[0]}"
        if bad
        else f"all documents of {files} are empty; give other files, or other --json-keys"
    )
    return DataError(f"there is no text in the input: {why}")


@contextmanager
def _undamaged(path: Path, dtype: np.dtype[Any]) -> Iterator[tuple[Footer, Iterator[tuple[int, Block]]]]:
    """``open_shard``, but a damaged one is removed, that the same command makes it anew."""
    try:
        with open_shard(path, dtype) as opened:
            yield opened
    except DamagedShardError as error:
        path.unlink(missing_ok=True)
        raise DataError(f"{error}, and was removed; run the same command again, which makes it anew") from None


def _add(total: Footer, footer: Footer) -> None:
    total.documents += footer.documents
    total.sequences += footer.sequences
    total.bad += footer.bad
    total.text_bytes = [one + other for one, other in zip(total.text_bytes, footer.text_bytes, strict=True)]
    total.largest = [max(one, other) for one, other in zip(total.largest, footer.largest, strict=True)]

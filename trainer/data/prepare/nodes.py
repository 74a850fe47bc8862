"""What several nodes that share a preparation must know of each other, told by files in its journal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.data.errors import DataError
from trainer.data.indexed.index_format import files_of
from trainer.data.indexed.manifest import read_manifest
from trainer.data.prepare.journal import Journal, Plan
from trainer.data.prepare.progress import say

SILENT_SECONDS = 600.0
"""After so long without a sign of life a node is not waited for any longer: some start minutes after the others, and a
network file system may tell of a file a minute late."""
_LOOK_SECONDS = 1.0


def wait_for_nodes(journal: Journal, chunks: int, report: Callable[[int, str], None]) -> None:
    """Wait until all chunks are done and all nodes have arrived: who comes later than the end would begin anew.

    Args:
        journal: of the preparation.
        chunks: how many there are, of all nodes.
        report: called now and then with the number of chunks done, and what is waited for.

    Raises:
        DataError: a node has failed, or there has been no sign of life for long.
    """
    known, since = None, time.monotonic()
    while True:
        done, absent = journal.done(), journal.marks.absent()
        missing = [number for number in range(chunks) if number not in done]
        if not missing and not absent:
            return
        failure = journal.marks.failure()
        if failure is not None:
            raise DataError(failure)
        signs = (len(done), absent, journal.marks.signs_of_life())
        if signs != known:
            known, since = signs, time.monotonic()
        awaited = _awaited(missing, chunks, absent, journal.marks.nodes)
        if time.monotonic() - since > SILENT_SECONDS:
            raise DataError(
                f"waited for {awaited}, and in {SILENT_SECONDS:.0f} s there was no sign of life; see what that node "
                "says, and start all of them again"
            )
        report(len(done), f"waiting for {awaited}")
        time.sleep(_LOOK_SECONDS)


def _awaited(missing: Sequence[int], chunks: int, absent: Sequence[int], nodes: int) -> str:
    if not missing:
        return f"the end of node {', '.join(map(str, absent))}"
    of_nodes = Counter(number % nodes for number in missing)
    shares = ", ".join(f"{count:,} of node {node}" for node, count in sorted(of_nodes.items()))
    return f"{len(missing):,} of {chunks:,} parts ({shares})"


def is_late(journal: Journal, plan: Plan, prefixes: Sequence[Path]) -> bool:
    """Whether a node was started after the end, as by a scheduler that starts one node again.

    Where the output looks finished, and nobody has begun to make it anew, the first node is given as much time to do so
    as that one would wait for us: it may be the one that is late.
    """
    if journal.is_begun or not all(_is_finished(prefix, plan) for prefix in prefixes):
        return False
    say(f"{prefixes[0]}: looks finished; waiting {SILENT_SECONDS:.0f} s for node 0, which may begin it anew")
    deadline = time.monotonic() + SILENT_SECONDS
    while not journal.is_begun:
        if time.monotonic() > deadline:
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def _is_finished(prefix: Path, plan: Plan) -> bool:
    """Whether there is a pair of this tokenizer that is younger than all of the input."""
    try:
        manifest = read_manifest(prefix)
        written = min(path.stat().st_mtime_ns for path in files_of(prefix))
    except (DataError, OSError):
        return False
    tokenizer = (plan.tokenizer_sha256, plan.vocab_size, plan.eod)
    return (
        manifest is not None
        and (manifest.tokenizer_sha256, manifest.vocab_size, manifest.eod) == tokenizer
        and written > max((file.mtime_ns for file in plan.inputs), default=0)
    )

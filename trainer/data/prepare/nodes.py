"""Coordination of several nodes that share a preparation, through files in its journal."""

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
"""Time without a heartbeat after which a node is considered lost: nodes may start minutes apart, and a network file
system may show a file a minute late."""
_POLL_SECONDS = 1.0


def wait_for_nodes(journal: Journal, chunks: int, report: Callable[[int, str], None]) -> None:
    """Wait until all chunks are done and all nodes have finished.

    Otherwise a node that is late would start over.

    Args:
        journal: journal of the preparation.
        chunks: number of chunks of all nodes.
        report: called periodically with the number of chunks done and the reason for waiting.

    Raises:
        DataError: a node has failed, or no node made progress for SILENT_SECONDS.
    """
    known, since = None, time.monotonic()
    while True:
        done, unfinished = journal.done(), journal.node_status.unfinished_nodes()
        missing = [number for number in range(chunks) if number not in done]
        if not missing and not unfinished:
            return
        failure = journal.node_status.failure()
        if failure is not None:
            raise DataError(failure)
        # Any change is a sign of life; clocks of nodes may differ, so that ages are not compared.
        state = (len(done), unfinished, journal.node_status.heartbeats())
        if state != known:
            known, since = state, time.monotonic()
        awaited = _awaited(missing, chunks, unfinished, journal.node_status.nodes)
        if time.monotonic() - since > SILENT_SECONDS:
            raise DataError(
                f"waited for {awaited}, and there was no sign of life for {SILENT_SECONDS:.0f} s; read that node's "
                "log, and start all nodes again"
            )
        report(len(done), f"waiting for {awaited}")
        time.sleep(_POLL_SECONDS)


def _awaited(missing: Sequence[int], chunks: int, unfinished: Sequence[int], nodes: int) -> str:
    if not missing:
        return f"the end of node {', '.join(map(str, unfinished))}"
    of_nodes = Counter(number % nodes for number in missing)
    shares = ", ".join(f"{count:,} of node {node}" for node, count in sorted(of_nodes.items()))
    return f"{len(missing):,} of {chunks:,} parts ({shares})"


def is_late(journal: Journal, plan: Plan, prefixes: Sequence[Path]) -> bool:
    """True if this node starts after the end, as when a scheduler restarts it.

    If the output looks finished and no node has started over, wait SILENT_SECONDS for the first node to do so: the
    first node may be the late one.
    """
    if journal.is_begun or not all(_is_finished(prefix, plan) for prefix in prefixes):
        return False
    say(f"{prefixes[0]}: looks finished; waiting {SILENT_SECONDS:.0f} s for node 0 to start over")
    deadline = time.monotonic() + SILENT_SECONDS
    while not journal.is_begun:
        if time.monotonic() > deadline:
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _is_finished(prefix: Path, plan: Plan) -> bool:
    """True if a dataset of this tokenizer exists, younger than all of the input."""
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

"""Read the whole metrics.jsonl of runs through their transports, on all cores if they are long."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass

from llmctl.runs.metrics import ReadParts
from llmctl.runs.series.columns import Columns, parse_columns
from llmctl.runs.series.history import RunHistory
from llmctl.transport.file_reads import FileRead

CHUNK = 1 << 20
"""Bytes of one read, some two thousand rows: their objects fit the cache of a core, larger chunks take longer."""
WORTH_PROCESSES = 24 << 20
"""Bytes of all files from which other processes help: less are parsed sooner than processes start (0.2 s)."""
_MOST_PROCESSES = 8


@dataclass(frozen=True)
class MetricsSource:
    """The metrics file of one run, and the ``read_parts`` of its transport."""

    path: str
    read: ReadParts


def read_histories(sources: Sequence[MetricsSource], keys: Sequence[str]) -> list[RunHistory]:
    """The history of each run, in order; empty for a missing file.

    Args:
        sources: the runs' files.
        keys: keys or patterns of keys, such as ``*_loss``.

    Raises:
        SchedulerError: a machine cannot be reached.
    """
    size = sum(_size(source) for source in sources)
    processes = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))
    if size < WORTH_PROCESSES or processes < 2:
        return [_history(source, keys, None, 1) for source in sources]
    import multiprocessing

    # Not by fork: a connection's threads may hold locks at that moment.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        return [_history(source, keys, pool, 2 * processes) for source in sources]


def _history(source: MetricsSource, keys: Sequence[str], pool: Executor | None, ahead: int) -> RunHistory:
    """The history of one run, at most ``ahead`` chunks of which are in memory."""
    history = RunHistory()
    waiting: deque[Future[Columns]] = deque()
    for chunk in whole_lines(source):
        if pool is None:
            history.add(parse_columns(chunk, keys))
            continue
        waiting.append(pool.submit(parse_columns, chunk, keys))
        if len(waiting) >= ahead:
            history.add(waiting.popleft().result())
    for future in waiting:
        history.add(future.result())
    return history


def whole_lines(source: MetricsSource) -> Iterator[bytes]:
    """The file in chunks of whole lines; a last line without its newline is left out."""
    offset, partial = 0, b""
    while True:
        (part,) = source.read([FileRead(source.path, offset, CHUNK)])
        if part is None or not part.data:
            return
        offset = part.end
        cut = part.data.rfind(b"\n") + 1
        if cut:
            yield partial + part.data[:cut]
            partial = part.data[cut:]
        else:
            partial += part.data
        if offset >= part.size:
            return


def _size(source: MetricsSource) -> int:
    (part,) = source.read([FileRead(source.path, 0, 1)])
    return part.size if part is not None else 0

"""Read the whole metrics.jsonl of runs through their transports, on all cores if they are long."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass

from llmctl.runs.metrics import ReadParts
from llmctl.runs.series.columns import Columns, parse_columns
from llmctl.runs.series.history import RunHistory
from llmctl.transport.file_reads import FileRead, read_parts

CHUNK = 1 << 20
"""Bytes of one read, some two thousand rows: their objects fit the cache of a core, larger chunks take longer."""
AHEAD = 32
"""Most chunks that are read and not yet taken: the work of other processes while curves are made of a history."""
WORTH_PROCESSES = 24 << 20
"""Bytes of all files from which other processes help: less are parsed sooner than processes start (0.2 s)."""
_MOST_PROCESSES = 8
_LONG_ROW = 1 << 16
"""Bytes read behind a span, for the rest of its last line: a hundred layers with ten numbers each."""


@dataclass(frozen=True)
class MetricsSource:
    """The metrics file of one run.

    Attributes:
        path: on its machine.
        read: ``read_parts`` of the transport to that machine.
        is_here: True if other processes of this machine can open the file; its bytes then need not go to them.
    """

    path: str
    read: ReadParts
    is_here: bool = False

    @property
    def size(self) -> int:
        """Bytes of the file; 0 if it is missing. Costs a round trip."""
        (part,) = self.read([FileRead(self.path, 0, 1)])
        return part.size if part is not None else 0


def read_histories(sources: Sequence[MetricsSource], keys: Sequence[str]) -> Iterator[RunHistory]:
    """The history of each run, in order; empty for a missing file.

    A history of a million rows takes 100 MB: a caller of many runs makes curves of each before the next. Meanwhile
    other processes go on.

    Args:
        sources: the runs' files.
        keys: keys or patterns of keys, such as ``*_loss``.

    Raises:
        SchedulerError: a machine cannot be reached.
    """
    size = sum(source.size for source in sources)
    processes = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))
    if size < WORTH_PROCESSES or processes < 2:
        yield from (read_history(source, keys) for source in sources)
        return
    import multiprocessing

    # Not by fork: a connection's threads may hold locks at that moment.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from _histories_of(pool, sources, keys)


def read_history(source: MetricsSource, keys: Sequence[str]) -> RunHistory:
    """The history of one run, read in this process alone; see read_histories."""
    history = RunHistory()
    for chunk in whole_lines(source):
        history.add(parse_columns(chunk, keys))
    return history


def _histories_of(pool: Executor, sources: Sequence[MetricsSource], keys: Sequence[str]) -> Iterator[RunHistory]:
    """Parse the chunks of all files in other processes, some ahead of the history that is next."""
    histories = [RunHistory() for _ in sources]
    chunks = ((run, chunk) for run, source in enumerate(sources) for chunk in _chunks_of(source))
    waiting: deque[tuple[int, Future[Columns]]] = deque()
    given = 0
    while True:
        while len(waiting) < AHEAD and (found := next(chunks, None)) is not None:
            waiting.append((found[0], pool.submit(_parse, found[1], keys)))
        if not waiting:
            break
        run, columns = waiting.popleft()
        while given < run:
            yield histories[given]
            histories[given] = RunHistory()  # its rows are the caller's now
            given += 1
        histories[run].add(columns.result())
    yield from histories[given:]


@dataclass(frozen=True)
class _Span:
    """The lines of a file of this machine that begin from one offset to before another."""

    path: str
    begin: int
    end: int

    def read(self) -> bytes:
        """The lines; without a last one that lacks its newline."""
        # From the newline before the first line, or what stands in its place in a line that begins earlier.
        first, margin = max(0, self.begin - 1), _LONG_ROW
        while True:
            (part,) = read_parts([FileRead(self.path, first, self.end - first + margin)])
            if part is None:
                return b""
            stop = part.data.find(b"\n", self.end - part.offset - 1)
            if stop >= 0 or part.end >= part.size:
                break
            margin *= 16
        start = part.data.find(b"\n") if self.begin else -1
        stop = stop if stop >= 0 else part.data.rfind(b"\n")
        return part.data[start + 1 : stop + 1] if start >= 0 or not self.begin else b""


def _chunks_of(source: MetricsSource) -> Iterator[bytes | _Span]:
    if not source.is_here:
        yield from whole_lines(source)
        return
    size = source.size
    yield from (_Span(source.path, begin, min(size, begin + CHUNK)) for begin in range(0, size, CHUNK))


def _parse(chunk: bytes | _Span, keys: Sequence[str]) -> Columns:
    return parse_columns(chunk if isinstance(chunk, bytes) else chunk.read(), keys)


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

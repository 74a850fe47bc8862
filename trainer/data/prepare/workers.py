"""Processes that each do a chunk at a time, with a tokenizer of their own."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from trainer.data.errors import DataError
from trainer.data.prepare.chunk_work import ChunkWork, do_chunk
from trainer.data.prepare.chunks import Chunk
from trainer.data.prepare.part_file import Footer
from trainer.data.tokenizers.factory import open_tokenizer
from trainer.data.tokenizers.gigatoken_engine import resident_bytes, return_freed_memory
from trainer.data.tokenizers.settings import TokenizerSettings
from trainer.data.tokenizers.tokenizer import Encoder
from trainer.data.tokenizers.vocabulary import VocabularyTokenizer

FREED_BYTES = 16 << 20
"""So much growth may be memory that is free, and that the C library keeps: 20 to 40 MB after some chunks. To give it
back takes a few milliseconds of the 0.1 to 0.5 s that a chunk takes."""
WORN_BYTES = 128 << 20
"""A process that has grown by so much is replaced: libraries remember words, and fragments stay of long documents."""
_READY = "ready"
_BEAT_SECONDS = 5.0
_TO_ALL = (signal.SIGINT, signal.SIGTERM)
"""What a terminal, or a scheduler, sends to every process at once."""
_NOBODY_THERE = (EOFError, BrokenPipeError, ConnectionResetError)
"""What a pipe says where the process that the user started was killed."""


@dataclass(frozen=True)
class TokenizerFacts:
    """What the whole preparation needs to know of the tokenizer.

    Attributes:
        settings: to open it with, the engine included.
        sha256: fingerprint.
        vocab_size: decides the dtype.
        eod: ends documents.
        engine: that encodes.
        notes: for the user.
    """

    settings: TokenizerSettings
    sha256: str
    vocab_size: int
    eod: int | None
    engine: str
    notes: tuple[str, ...]


def learn_facts(settings: TokenizerSettings) -> TokenizerFacts:
    """Open the tokenizer and choose its engine, in this process.

    Raises:
        DataError: it cannot be used.
    """
    tokenizer = open_tokenizer(settings)
    return TokenizerFacts(
        # A NullTokenizer has but itself.
        replace(settings, engine=tokenizer.engine) if settings.has_files else settings,
        tokenizer.sha256,
        tokenizer.vocab_size,
        tokenizer.eod,
        tokenizer.engine,
        tokenizer.notes,
    )


def open_same(facts: TokenizerFacts) -> Encoder:
    """What encodes as the tokenizer of ``facts``, from its files.

    Raises:
        DataError: it cannot be opened, or is another one by now.
    """
    tokenizer = open_tokenizer(facts.settings)
    found = (tokenizer.sha256, tokenizer.vocab_size, tokenizer.eod)
    if found != (facts.sha256, facts.vocab_size, facts.eod):
        raise DataError(
            f"{facts.settings.name}: the tokenizer was changed while it was used (its sha256 was {facts.sha256[:12]}, "
            f"and is {tokenizer.sha256[:12]}); put back the first, or begin anew with --restart"
        )
    return tokenizer.encoder() if isinstance(tokenizer, VocabularyTokenizer) else tokenizer


def learn_facts_elsewhere(settings: TokenizerSettings) -> TokenizerFacts:
    """``learn_facts`` in a process that then ends, and with it the memory that comparing engines takes.

    Raises:
        DataError: it cannot be used.
    """
    worker = _Worker(_tell_facts, settings)
    try:
        found = worker.receive()
    finally:
        close_all([worker])
    assert isinstance(found, TokenizerFacts)
    return found


def _tell_facts(connection: Connection[Any, Any], settings: TokenizerSettings) -> None:
    with suppress(*_NOBODY_THERE):
        try:
            connection.send(learn_facts(settings))
        except DataError as error:
            connection.send(error)


def _do_chunks(connection: Connection[Any, Any], work: ChunkWork, facts: TokenizerFacts) -> None:
    with suppress(*_NOBODY_THERE):
        try:
            tokenizer = open_same(facts)
        except DataError as error:
            connection.send(error)
            return
        connection.send(_READY)
        begun: int | None = None
        while True:
            chunk = connection.recv()
            try:
                footer = do_chunk(chunk, work, tokenizer)
            except (DataError, OSError) as error:
                connection.send(error)
                continue
            del chunk
            if begun is None or (resident_bytes() or 0) - begun > FREED_BYTES:
                return_freed_memory()
            resident = resident_bytes() or 0
            begun = resident if begun is None else begun
            connection.send((footer, resident - begun > WORN_BYTES))


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Start a process that Ctrl-C and SIGTERM do not reach, and that is not left half started by one.

    They are for the process that the user started, which then ends the others. A mask is inherited (signal(7)).
    """
    # The first start of a process would also start multiprocessing's tracker of resources, and that unblocks both.
    resource_tracker.ensure_running()
    noted: list[int] = []
    # The mask is this thread's alone, and a library may have others.
    is_main = threading.current_thread() is threading.main_thread()
    # One that is not Python's is None, and could not be put back.
    known = {number: signal.getsignal(number) for number in _TO_ALL} if is_main else {}
    handlers = {number: handler for number, handler in known.items() if handler is not None}
    for one in handlers:
        signal.signal(one, lambda number, _: noted.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for one, handler in handlers.items():
            signal.signal(one, handler)
    for number in noted:
        signal.raise_signal(number)


class _Worker:
    """A process and our end of the pipe to it. Spawned, not forked: what we hold is not its."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.is_ready = False
        self.chunk: Chunk | None = None
        self._process: BaseProcess = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        try:
            with _without_interrupts():
                self._process.start()
        except BaseException:
            # Nobody else knows of it yet.
            if self._process.pid is not None:
                close_all([self])
            raise
        finally:
            # Else the end of the process would not be the end of the pipe.
            theirs.close()

    def give(self, chunk: Chunk) -> None:
        # What it is, not what it holds: that is the worker's memory now.
        self.chunk = replace(chunk, content=None)
        try:
            self.connection.send(chunk)
        except (BrokenPipeError, ConnectionResetError):
            raise self._died() from None

    def receive(self) -> Any:
        """The next answer; raises OSError and what the process could not open, gives what is wrong with a chunk."""
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._died() from None
        if isinstance(answer, OSError) or (self.chunk is None and isinstance(answer, DataError)):
            raise answer
        return answer

    def _died(self) -> DataError:
        self._process.join()
        code = self._process.exitcode or 0
        what = f"was ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
        why = "; the machine may be out of memory: run again with fewer --workers" if code == -signal.SIGKILL else ""
        doing = "" if self.chunk is None else f" while it encoded {self.chunk.spans[0].path}"
        return DataError(f"a worker process {what}{doing}{why}")

    def end(self) -> None:
        self.connection.close()
        # What it writes is not there before it is whole.
        self._process.kill()

    def wait(self) -> None:
        self._process.join()
        self._process.close()


def close_all(workers: Sequence[_Worker]) -> None:
    """End processes, all at the same time."""
    for worker in workers:
        worker.end()
    for worker in workers:
        worker.wait()


class _Ahead:
    """The chunks that are next: as many as there are processes, but none after one whose content we hold."""

    def __init__(self, chunks: Iterator[Chunk], most: int) -> None:
        self._chunks = chunks
        self._most = most
        self._next: deque[Chunk] = deque()
        self.is_at_end = False

    def __len__(self) -> int:
        return len(self._next)

    def fill(self) -> None:
        while not self.is_at_end and len(self) < self._most and not (self._next and self._next[-1].content):
            chunk = next(self._chunks, None)
            if chunk is None:
                self.is_at_end = True
            else:
                self._next.append(chunk)

    def pop(self) -> Chunk:
        return self._next.popleft()


def do_chunks(
    chunks: Iterator[Chunk], work: ChunkWork, facts: TokenizerFacts, processes: int, beat: Callable[[], None]
) -> Generator[tuple[Chunk, Footer], None, None]:
    """Do ``chunks`` in so many processes; each as it is done, in any order.

    Of several chunks with an error that of the first counts, whichever process was sooner. Processes start at the same
    time, and are given work only when they have opened the tokenizer, so that none is waited for.

    Args:
        chunks: asked for no more than there are processes, and for one at a time where chunks hold their content.
        work: what is done.
        facts: of the tokenizer.
        processes: how many.
        beat: called every few seconds.

    Raises:
        DataError: an input cannot be read, or holds what is no document, or a process died.
        OSError: a shard cannot be written.
    """
    workers: list[_Worker] = []
    ahead = _Ahead(chunks, processes)
    failed: dict[int, DataError] = {}
    try:
        while True:
            if not failed:
                ahead.fill()
                _start(workers, ahead, processes, work, facts)
                for worker in workers:
                    if worker.is_ready and worker.chunk is None and len(ahead):
                        worker.give(ahead.pop())
                        ahead.fill()
            busy = [worker.chunk.number for worker in workers if worker.chunk is not None]
            if failed and min(busy, default=sys.maxsize) > min(failed):
                raise failed[min(failed)]
            if not busy and not len(ahead):
                return
            yield from _results(workers, failed)
            beat()
    finally:
        close_all(workers)


def _start(workers: list[_Worker], ahead: _Ahead, processes: int, work: ChunkWork, facts: TokenizerFacts) -> None:
    """Start processes: all at first, in the end as many as there are chunks."""
    busy = sum(worker.chunk is not None for worker in workers)
    wanted = min(processes, busy + len(ahead)) if ahead.is_at_end else processes
    while len(workers) < wanted:
        workers.append(_Worker(_do_chunks, work, facts))


def _results(workers: list[_Worker], failed: dict[int, DataError]) -> Iterator[tuple[Chunk, Footer]]:
    """What processes have done by now, or do next; what is wrong with a chunk goes to ``failed``."""
    ready = wait([worker.connection for worker in workers], _BEAT_SECONDS)
    for worker in [worker for worker in workers if worker.connection in ready]:
        answer = worker.receive()
        done, worker.chunk = worker.chunk, None
        if answer == _READY:
            worker.is_ready = True
            continue
        assert done is not None
        if isinstance(answer, DataError):
            failed[done.number] = answer
            continue
        footer, is_worn = answer
        if is_worn:
            workers.remove(worker)
            close_all([worker])
        yield done, footer

"""Worker processes that each encode a chunk at a time, with their own tokenizer."""

from __future__ import annotations

import multiprocessing
import os
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

from trainer.data.background import end_with_parent
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
"""Growth that may be freed memory which the C library keeps: 20 to 40 MB after some chunks. Returning this memory to
the system takes a few milliseconds of the 0.1 to 0.5 s per chunk."""
WORN_BYTES = 128 << 20
"""Growth after which a process is replaced: libraries cache words, and long documents leave fragmented memory."""
_READY = "ready"
_BEAT_SECONDS = 5.0
_TO_ALL = (signal.SIGINT, signal.SIGTERM)
"""Signals that a terminal, or a scheduler, sends to every process at once."""
_NOBODY_THERE = (EOFError, BrokenPipeError, ConnectionResetError)
"""Errors of a pipe whose other process was killed."""


@dataclass(frozen=True)
class TokenizerFacts:
    """Properties of the tokenizer that the whole preparation needs.

    Attributes:
        settings: settings to open the tokenizer with, including the engine.
        sha256: fingerprint.
        vocab_size: determines the dtype.
        eod: end-of-document token.
        engine: engine that encodes.
        notes: lines for the user.
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
        DataError: the tokenizer cannot be used.
    """
    tokenizer = open_tokenizer(settings)
    return TokenizerFacts(
        # A NullTokenizer has no other engines.
        replace(settings, engine=tokenizer.engine) if settings.has_files else settings,
        tokenizer.sha256,
        tokenizer.vocab_size,
        tokenizer.eod,
        tokenizer.engine,
        tokenizer.notes,
    )


def open_same(facts: TokenizerFacts) -> Encoder:
    """Open an encoder with the same tokenizer as ``facts``, from its files.

    Raises:
        DataError: the tokenizer cannot be opened, or has changed.
    """
    tokenizer = open_tokenizer(facts.settings)
    found = (tokenizer.sha256, tokenizer.vocab_size, tokenizer.eod)
    if found != (facts.sha256, facts.vocab_size, facts.eod):
        raise DataError(
            f"{facts.settings.name}: the tokenizer was changed while it was in use (its sha256 was "
            f"{facts.sha256[:12]}, and is now {tokenizer.sha256[:12]}); restore it, or start over with --restart"
        )
    return tokenizer.encoder() if isinstance(tokenizer, VocabularyTokenizer) else tokenizer


def learn_facts_elsewhere(settings: TokenizerSettings) -> TokenizerFacts:
    """Run ``learn_facts`` in a short-lived process, to free the memory for comparing engines.

    Raises:
        DataError: the tokenizer cannot be used.
    """
    worker = _Worker(_tell_facts, settings)
    try:
        found = worker.receive()
    finally:
        close_all([worker])
    assert isinstance(found, TokenizerFacts)
    return found


def _serve(parent: int, target: Callable[..., None], *arguments: Any) -> None:
    """Do ``target`` in a worker process, which SIGKILL of its parent ends too, in the middle of a chunk."""
    end_with_parent(parent)
    target(*arguments)


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
    """Start a process with Ctrl-C and SIGTERM blocked; defer both signals here meanwhile.

    The process that the user started receives the signals, and ends the others. A signal mask is inherited (signal(7)).
    """
    # The first start of a process would also start multiprocessing's resource tracker, which unblocks both signals.
    resource_tracker.ensure_running()
    noted: list[int] = []
    # The mask applies to this thread alone, and a library may have other threads.
    is_main = threading.current_thread() is threading.main_thread()
    # getsignal() is None for a handler that Python did not install; such a handler could not be restored.
    known = {number: signal.getsignal(number) for number in _TO_ALL} if is_main else {}
    handlers = {number: handler for number, handler in known.items() if handler is not None}
    for handled in handlers:
        signal.signal(handled, lambda number, _: noted.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for handled, handler in handlers.items():
            signal.signal(handled, handler)
    for number in noted:
        signal.raise_signal(number)


class _Worker:
    """A process and our end of the pipe to it.

    Spawned, not forked, so that it inherits none of our memory.
    """

    def __init__(self, target: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.is_ready = False
        self.chunk: Chunk | None = None
        given = (os.getpid(), target, theirs, *arguments)
        self._process: BaseProcess = context.Process(target=_serve, args=given, daemon=True)
        try:
            with _without_interrupts():
                self._process.start()
        except BaseException:
            # No other code holds a reference to the process yet.
            if self._process.pid is not None:
                close_all([self])
            raise
        finally:
            # An open copy here would keep the pipe alive after the process has ended.
            theirs.close()

    def give(self, chunk: Chunk) -> None:
        # Without its content, which is now in the worker's memory.
        self.chunk = replace(chunk, content=None)
        try:
            self.connection.send(chunk)
        except (BrokenPipeError, ConnectionResetError):
            raise self._died() from None

    def receive(self) -> Any:
        """Return the next answer, which may be the DataError of a chunk.

        Raises OSError and errors of the start.
        """
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
        how = f"was ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
        why = "; the machine may be out of memory: run again with fewer --workers" if code == -signal.SIGKILL else ""
        doing = "" if self.chunk is None else f" while it encoded {self.chunk.spans[0].path}"
        return DataError(f"a worker process {how}{doing}{why}")

    def end(self) -> None:
        self.connection.close()
        # Safe at any time: a part file gets its final name only when it is complete.
        self._process.kill()

    def wait(self) -> None:
        self._process.join()
        self._process.close()


def close_all(workers: Sequence[_Worker]) -> None:
    """Kill processes, all at the same time, and wait for them."""
    for worker in workers:
        worker.end()
    for worker in workers:
        worker.wait()


class _Ahead:
    """Queue of the next chunks: one per process, none after a chunk with content."""

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
    """Encode ``chunks`` in ``processes`` processes; yields finished chunks in any order.

    If several chunks fail, the error of the first chunk is raised, whichever process failed first. Processes start
    at the same time, and get work only after they have opened the tokenizer, so that no process waits for another.

    Args:
        chunks: read ahead by at most one chunk per process, and one at a time if chunks hold their content.
        work: options of the work.
        facts: properties of the tokenizer.
        processes: number of processes.
        beat: called every few seconds.

    Raises:
        DataError: an input cannot be read or holds a bad document, or a process died.
        OSError: a part file cannot be written.
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
            # Every chunk before the failed one is done, so that a restart finds the same first fault.
            if failed and min(busy, default=sys.maxsize) > min(failed):
                raise failed[min(failed)]
            if not busy and not len(ahead):
                return
            yield from _results(workers, failed)
            beat()
    finally:
        close_all(workers)


def _start(workers: list[_Worker], ahead: _Ahead, processes: int, work: ChunkWork, facts: TokenizerFacts) -> None:
    """Start all processes, or after the last chunk at most one per remaining chunk."""
    busy = sum(worker.chunk is not None for worker in workers)
    wanted = min(processes, busy + len(ahead)) if ahead.is_at_end else processes
    while len(workers) < wanted:
        workers.append(_Worker(_do_chunks, work, facts))


def _results(workers: list[_Worker], failed: dict[int, DataError]) -> Iterator[tuple[Chunk, Footer]]:
    """Yield finished chunks, after waiting for an answer; stores errors of chunks in ``failed``."""
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

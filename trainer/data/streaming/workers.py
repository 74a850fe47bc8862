"""Processes that encode pieces, each with a tokenizer, and the thread that drives them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from trainer.data.background import end_with_parent
from trainer.data.errors import DataError, LostWorkerError
from trainer.data.prepare.workers import WORN_BYTES
from trainer.data.streaming.text_pieces import Piece
from trainer.data.streaming.work import Encoded, Reading, Share, encode_piece
from trainer.data.tokenizers.factory import open_tokenizer
from trainer.data.tokenizers.gigatoken_engine import resident_bytes
from trainer.data.tokenizers.settings import TokenizerSettings
from trainer.data.tokenizers.tokenizer import Tokenizer
from trainer.data.watchdog import Watchdog

T = TypeVar("T")
_FOR_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that may reach every process of a job, but are for the training process, which may continue for a while."""
_SECONDS_TO_DIE = 10.0


class Encoder(Protocol):
    """Interface of an encoder of pieces."""

    def encode(
        self, pieces: Iterator[Piece], share: Share, reads: Callable[[], str] = lambda: "text"
    ) -> Iterator[Encoded]:
        """Yield the encoding of each piece, in order; reads ahead only few of ``pieces``.

        Args:
            pieces: pieces to encode.
            share: the documents of the split.
            reads: returns the name of the file that ``pieces`` reads at the moment, for messages.
        """

    def ahead(self, work: Callable[[], T]) -> Future[T] | None:
        """Begin ``work`` in the background; None for an encoder without a background thread."""

    def result(self, future: Future[T]) -> T:
        """Wait for the result of ``ahead``; raises an error if it will never come."""

    def close(self) -> None:
        """End all processes and threads."""


class InlineEncoder:
    """Encodes on demand, in this process."""

    def __init__(self, settings: TokenizerSettings, reading: Reading) -> None:
        self._settings = settings
        self._reading = reading
        self._tokenizer: Tokenizer | None = None

    def encode(
        self, pieces: Iterator[Piece], share: Share, reads: Callable[[], str] = lambda: "text"
    ) -> Iterator[Encoded]:
        """See Encoder."""
        del reads
        self._tokenizer = self._tokenizer or open_tokenizer(self._settings)
        for piece in pieces:
            yield encode_piece(piece, self._reading, share, self._tokenizer)

    def ahead(self, work: Callable[[], T]) -> Future[T] | None:
        """See Encoder."""
        del work
        return None

    def result(self, future: Future[T]) -> T:
        """See Encoder."""
        return future.result()

    def close(self) -> None:
        """See Encoder."""


class EncoderPool:
    """Encodes in worker processes, which start on demand. ``encode`` is for one thread."""

    def __init__(
        self,
        processes: int,
        settings: TokenizerSettings,
        reading: Reading,
        *,
        patience_s: float = 600.0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Create the pool; starts nothing yet.

        Args:
            processes: maximum number of processes.
            settings: settings of the tokenizer.
            reading: options for finding documents.
            patience_s: seconds of silence after which a process is given up.
            say: called with a line about a process that is silent, or at work for long.
        """
        self._processes = processes
        self._arguments = (settings, reading)
        self._free: list[_Worker] = []
        self._all: list[_Worker] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, "streaming")
        self._watch = Watchdog(patience_s, say)
        self._lost: Future[NoReturn] = Future()

    def ahead(self, work: Callable[[], T]) -> Future[T] | None:
        """See Encoder."""
        return self._thread.submit(work)

    def result(self, future: Future[T]) -> T:
        """See Encoder.

        Raises:
            LostWorkerError: the thread hangs.
            DataError: the pool is closed.
        """
        awaited: tuple[Future[Any], ...] = (future, self._lost)
        wait(awaited, return_when=FIRST_COMPLETED)
        return self._lost.result() if self._lost.done() else future.result()

    def encode(
        self, pieces: Iterator[Piece], share: Share, reads: Callable[[], str] = lambda: "text"
    ) -> Iterator[Encoded]:
        """See Encoder.

        Raises:
            DataError: an error of a process.
            LostWorkerError: a process died, or hangs.
        """
        busy: deque[_Worker] = deque()
        try:
            for piece in self._watched(pieces, _Reader(reads, self._lost)):
                # One piece per process: a sender whose own result waits to be read would deadlock.
                if len(busy) == self._processes:
                    yield self._receive(busy)
                worker = self._free.pop() if self._free else self._start()
                busy.append(worker)
                self._watch.begin(worker)
                worker.give(piece, share)
                self._watch.begin(None)
            while busy:
                yield self._receive(busy)
        finally:
            self._watch.begin(None)
            # A late answer would be mistaken for the answer to the next piece.
            for worker in busy:
                self._end(worker)

    def _watched(self, pieces: Iterator[Piece], reader: _Reader) -> Iterator[Piece]:
        """Yield ``pieces``, while the watchdog watches ``reader``, the thread that may decompress them."""
        while True:
            self._watch.begin(reader)
            piece = next(pieces, None)
            self._watch.begin(None)
            if piece is None:
                return
            yield piece

    def _receive(self, busy: deque[_Worker]) -> Encoded:
        """Return the result of the first of ``busy``, and remove this worker."""
        worker = busy[0]
        self._watch.begin(worker)
        found, is_worn = worker.receive()
        self._watch.begin(None)
        busy.popleft()
        if is_worn:
            self._end(worker)
        else:
            self._free.append(worker)
        return found

    def _start(self) -> _Worker:
        with self._lock:
            if self._is_closed:
                raise DataError("data.streaming: was closed")
            worker = _Worker(*self._arguments)
            self._all.append(worker)
            return worker

    def _end(self, worker: _Worker) -> None:
        with self._lock:
            self._all.remove(worker)
        _kill([worker])
        worker.connection.close()

    def close(self) -> None:
        """See Encoder."""
        with self._lock:
            self._is_closed = True
            workers = list(self._all)
        self._watch.close()
        # Processes first: this wakes a thread that waits for their answers.
        _kill(workers)
        # A thread that hangs does not end; the process exits without it.
        is_lost = self._lost.done()
        self._thread.shutdown(wait=not is_lost, cancel_futures=True)
        if not is_lost:
            # concurrent.futures.wait does not wake on a cancelled future.
            self._lost.set_exception(DataError("data.streaming: was closed"))
        for worker in workers:
            worker.connection.close()


class _Reader:
    """The creating thread, which decompresses text before it can be cut into pieces."""

    name = "the thread that reads compressed text"

    def __init__(self, reads: Callable[[], str], lost: Future[NoReturn]) -> None:
        self.proc = Path(f"/proc/self/task/{threading.get_native_id()}")
        self._reads = reads
        self._lost = lost

    @property
    def work(self) -> str:
        """See watchdog.Worker."""
        return f"reads {self._reads()}"

    def give_up(self, reason: str) -> None:
        """See watchdog.Worker."""
        self._lost.set_exception(LostWorkerError(reason))


class _Worker:
    """A process and our end of the pipe to it.

    Spawned, not forked, so that it inherits none of our memory.
    """

    def __init__(self, settings: TokenizerSettings, reading: Reading) -> None:
        context = multiprocessing.get_context("spawn")
        # A duplex pipe is a pair of sockets, on which ``kill`` relies.
        self.connection, theirs = context.Pipe(duplex=True)
        self._path = ""
        self._has_answered = False
        self._given_up: str | None = None
        arguments = (theirs, settings, reading, os.getpid())
        self._process: BaseProcess = context.Process(target=_serve, args=arguments, daemon=True)
        # Blocked before the process starts, since the process itself could block the signals only later. The first
        # start of a process also starts multiprocessing's resource tracker, which would unblock the signals.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_TRAINER)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # An open copy here would keep the pipe alive after the process has ended.
        theirs.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid or 0

    @property
    def name(self) -> str:
        """See watchdog.Worker."""
        return f"process {self.pid} of data.num_workers"

    @property
    def proc(self) -> Path:
        """See watchdog.Worker."""
        return Path(f"/proc/{self.pid}")

    @property
    def work(self) -> str:
        """See watchdog.Worker."""
        return f"encodes {self._path}" if self._has_answered else f"opens its tokenizer or encodes {self._path}"

    def give(self, piece: Piece, share: Share) -> None:
        self._path = piece.spans[0].path
        try:
            self.connection.send((piece, share))
        except (BrokenPipeError, ConnectionResetError):
            self.receive()  # raises the error that the process sent before its end, if any
            raise self._died() from None

    def receive(self) -> tuple[Encoded, bool]:
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):  # OSError in the middle of an answer
            raise self._died() from None
        self._has_answered = True
        if isinstance(answer, Exception):
            raise answer
        found, is_worn = answer
        return found, bool(is_worn)

    def _died(self) -> DataError:
        if self._given_up is not None:
            return LostWorkerError(self._given_up)
        self._process.join(_SECONDS_TO_DIE)
        code = self._process.exitcode or 0
        how = f"was ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
        why = "; the machine may be out of memory: set data.num_workers lower" if code == -signal.SIGKILL else ""
        return LostWorkerError(f"a process of data.num_workers {how} while it encoded {self._path}{why}")

    def give_up(self, reason: str) -> None:
        """See watchdog.Worker."""
        self._given_up = reason
        self.kill()

    def kill(self) -> None:
        """Kill the process without waiting; an orderly end would save no work."""
        self._process.kill()
        # A process that waits for a disk dies only when the disk answers. Shutting down the socket wakes its readers.
        with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def join(self, seconds: float) -> None:
        """Wait for the end of the process, at most ``seconds``."""
        self._process.join(seconds)


def _kill(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.kill()
    deadline = time.monotonic() + _SECONDS_TO_DIE
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))


def _serve(connection: Connection[Any, Any], settings: TokenizerSettings, reading: Reading, parent: int) -> None:
    end_with_parent(parent)
    try:
        tokenizer = open_tokenizer(settings)
        begun = None
        while True:
            piece, share = connection.recv()
            try:
                found = encode_piece(piece, reading, share, tokenizer)
            except DataError as error:
                connection.send(error)
                continue
            del piece
            resident = resident_bytes() or 0
            begun = resident if begun is None else begun
            connection.send((found, resident - begun > WORN_BYTES))
    except DataError as error:
        connection.send(error)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the training process has ended

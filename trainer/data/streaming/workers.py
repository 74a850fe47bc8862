"""The processes that encode pieces, each with a tokenizer of its own, and the thread that drives them."""

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
from trainer.data.watchdog import SilenceWatch

T = TypeVar("T")
_FOR_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that may reach every process of a job and mean the training process alone, which may go on for a while."""
_SECONDS_TO_DIE = 10.0


class Encoder(Protocol):
    """Turns pieces into tokens."""

    def encode(
        self, pieces: Iterator[Piece], share: Share, reads: Callable[[], str] = lambda: "text"
    ) -> Iterator[Encoded]:
        """Each of ``pieces``, in order; ``pieces`` is asked for few more than have come back.

        Args:
            pieces: what is encoded.
            share: the documents of them that count.
            reads: what ``pieces`` reads at the moment, for people.
        """

    def ahead(self, work: Callable[[], T]) -> Future[T] | None:
        """Begin ``work`` in the background; None where there is no background."""

    def result(self, future: Future[T]) -> T:
        """What ``ahead`` began, once it is done; or the error that it never will be."""

    def close(self) -> None:
        """End all that is going on. Nothing is left behind."""


class InlineEncoder:
    """Encodes when it is asked to, in this process."""

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
    """Encodes in processes of its own, which start when there is something to do. ``encode`` is for one thread."""

    def __init__(
        self,
        processes: int,
        settings: TokenizerSettings,
        reading: Reading,
        *,
        patience_s: float = 600.0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Nothing is started yet.

        Args:
            processes: at most at a time.
            settings: of the tokenizer.
            reading: how documents are found.
            patience_s: of silence after which a process is given up.
            say: takes a line about a process that is silent, or at work for long.
        """
        self._processes = processes
        self._arguments = (settings, reading)
        self._free: list[_Worker] = []
        self._all: list[_Worker] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, "streaming")
        self._watch = SilenceWatch(patience_s, say)
        self._lost: Future[NoReturn] = Future()

    def ahead(self, work: Callable[[], T]) -> Future[T] | None:
        """See Encoder."""
        return self._thread.submit(work)

    def result(self, future: Future[T]) -> T:
        """See Encoder.

        Raises:
            LostWorkerError: our thread hangs.
            DataError: nothing is encoded any more.
        """
        awaited: tuple[Future[Any], ...] = (future, self._lost)
        wait(awaited, return_when=FIRST_COMPLETED)
        return self._lost.result() if self._lost.done() else future.result()

    def encode(
        self, pieces: Iterator[Piece], share: Share, reads: Callable[[], str] = lambda: "text"
    ) -> Iterator[Encoded]:
        """See Encoder.

        Raises:
            DataError: of a process.
            LostWorkerError: it died, or hangs.
        """
        busy: deque[_Worker] = deque()
        try:
            for piece in self._watched(pieces, _Reader(reads, self._lost)):
                # One piece each: who sends while its own result waits to be read would wait for ever.
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
            # What was left in the middle would be taken for the next answer.
            for worker in busy:
                self._end(worker)

    def _watched(self, pieces: Iterator[Piece], reader: _Reader) -> Iterator[Piece]:
        """``pieces``, which may have to be decompressed by ``reader``, the thread that asks for them."""
        while True:
            self._watch.begin(reader)
            piece = next(pieces, None)
            self._watch.begin(None)
            if piece is None:
                return
            yield piece

    def _receive(self, busy: deque[_Worker]) -> Encoded:
        """What the first of ``busy`` has made, which is then no longer among them."""
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
        # First the processes: a thread that waits for their answers then waits no longer.
        _kill(workers)
        # A thread that hangs will not end, and the process leaves without it.
        is_lost = self._lost.done()
        self._thread.shutdown(wait=not is_lost, cancel_futures=True)
        if not is_lost:
            # Who waits for what was cancelled is not told of that (concurrent.futures.wait).
            self._lost.set_exception(DataError("data.streaming: was closed"))
        for worker in workers:
            worker.connection.close()


class _Reader:
    """The thread that it is made in, which reads what has to be decompressed before it can be cut into pieces."""

    name = "the thread that reads compressed text"

    def __init__(self, reads: Callable[[], str], lost: Future[NoReturn]) -> None:
        self.proc = Path(f"/proc/self/task/{threading.get_native_id()}")
        self._reads = reads
        self._lost = lost

    @property
    def work(self) -> str:
        """See silence.Worker."""
        return f"reads {self._reads()}"

    def give_up(self, reason: str) -> None:
        """See silence.Worker."""
        self._lost.set_exception(LostWorkerError(reason))


class _Worker:
    """A process and our end of the pipe to it. Spawned, not forked: what we hold is not its."""

    def __init__(self, settings: TokenizerSettings, reading: Reading) -> None:
        context = multiprocessing.get_context("spawn")
        # Not a pair of pipes but of sockets, as duplex ones are: ``kill`` relies on it.
        self.connection, theirs = context.Pipe(duplex=True)
        self._path = ""
        self._has_answered = False
        self._given_up: str | None = None
        arguments = (theirs, settings, reading, os.getpid())
        self._process: BaseProcess = context.Process(target=_serve, args=arguments, daemon=True)
        # Blocked from its first instant on, and not only when it could say so itself. The first start of a process
        # also starts multiprocessing's tracker of resources, which would unblock them.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_TRAINER)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # Else the end of the process would not be the end of the pipe.
        theirs.close()

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid or 0

    @property
    def name(self) -> str:
        """See silence.Worker."""
        return f"process {self.pid} of data.num_workers"

    @property
    def proc(self) -> Path:
        """See silence.Worker."""
        return Path(f"/proc/{self.pid}")

    @property
    def work(self) -> str:
        """See silence.Worker."""
        return f"encodes {self._path}" if self._has_answered else f"opens its tokenizer or encodes {self._path}"

    def give(self, piece: Piece, share: Share) -> None:
        self._path = piece.spans[0].path
        try:
            self.connection.send((piece, share))
        except (BrokenPipeError, ConnectionResetError):
            self.receive()  # what it may have said before it ended
            raise self._died() from None

    def receive(self) -> tuple[Encoded, bool]:
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):  # the second one in the middle of an answer
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
        what = f"was ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
        why = "; the machine may be out of memory: set data.num_workers lower" if code == -signal.SIGKILL else ""
        return LostWorkerError(f"a process of data.num_workers {what} while it encoded {self._path}{why}")

    def give_up(self, reason: str) -> None:
        """See silence.Worker."""
        self._given_up = reason
        self.kill()

    def kill(self) -> None:
        """End it, without a wait for its end: it holds nothing that is worth more than the time to end in order."""
        self._process.kill()
        # One that waits for a disk does not die of that before the disk answers. Who waits for it no longer does.
        with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def join(self, seconds: float) -> None:
        """Wait for its end, at most so long."""
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
        return  # who asked is gone

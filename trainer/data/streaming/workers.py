"""The processes that encode pieces, each with a tokenizer of its own, and the thread that drives them."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar

from trainer.data.errors import DataError
from trainer.data.prepare.workers import WORN_BYTES
from trainer.data.streaming.pieces import Piece
from trainer.data.streaming.work import Encoded, Reading, Share, encode_piece
from trainer.data.tokenizers.gigatoken_engine import resident_bytes
from trainer.data.tokenizers.opening import open_tokenizer
from trainer.data.tokenizers.settings import TokenizerSettings
from trainer.data.tokenizers.tokenizer import Tokenizer

T = TypeVar("T")
_FOR_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that may reach every process of a job and mean the training process alone, which may go on for a while."""
_SECONDS_TO_DIE = 10.0


class Encoder(Protocol):
    """Turns pieces into tokens."""

    def encode(self, pieces: Iterator[Piece], share: Share) -> Iterator[Encoded]:
        """Each of ``pieces``, in order; ``pieces`` is asked for few more than have come back."""

    def ahead(self, work: Callable[[], T]) -> Future[T] | None:
        """Begin ``work`` in the background; None where there is no background."""

    def close(self) -> None:
        """End all that is going on. Nothing is left behind."""


class InlineEncoder:
    """Encodes when it is asked to, in this process."""

    def __init__(self, settings: TokenizerSettings, reading: Reading) -> None:
        self._settings = settings
        self._reading = reading
        self._tokenizer: Tokenizer | None = None

    def encode(self, pieces: Iterator[Piece], share: Share) -> Iterator[Encoded]:
        """See Encoder."""
        self._tokenizer = self._tokenizer or open_tokenizer(self._settings)
        for piece in pieces:
            yield encode_piece(piece, self._reading, share, self._tokenizer)

    def ahead(self, work: Callable[[], T]) -> Future[T] | None:
        """See Encoder."""
        del work
        return None

    def close(self) -> None:
        """See Encoder."""


class EncoderPool:
    """Encodes in processes of its own, which start when there is something to do. ``encode`` is for one thread."""

    def __init__(self, processes: int, settings: TokenizerSettings, reading: Reading) -> None:
        self._processes = processes
        self._arguments = (settings, reading)
        self._free: list[_Worker] = []
        self._all: list[_Worker] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, "streaming")

    def ahead(self, work: Callable[[], T]) -> Future[T] | None:
        """See Encoder."""
        return self._thread.submit(work)

    def encode(self, pieces: Iterator[Piece], share: Share) -> Iterator[Encoded]:
        """See Encoder.

        Raises:
            DataError: of a process, or it died.
        """
        busy: deque[_Worker] = deque()
        try:
            for piece in pieces:
                # One piece each: who sends while its own result waits to be read would wait for ever.
                if len(busy) == self._processes:
                    yield self._receive(busy.popleft())
                worker = self._free.pop() if self._free else self._start()
                worker.give(piece, share)
                busy.append(worker)
            while busy:
                yield self._receive(busy.popleft())
        finally:
            # What was left in the middle would be taken for the next answer.
            for worker in busy:
                self._end(worker)

    def _receive(self, worker: _Worker) -> Encoded:
        found, is_worn = worker.receive()
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
        worker.kill()
        worker.connection.close()

    def close(self) -> None:
        """See Encoder."""
        with self._lock:
            self._is_closed = True
            workers = list(self._all)
        # First the processes: a thread that waits for their answers then waits no longer.
        for worker in workers:
            worker.kill()
        self._thread.shutdown(wait=True, cancel_futures=True)
        for worker in workers:
            worker.connection.close()


class _Worker:
    """A process and our end of the pipe to it. Spawned, not forked: what we hold is not its."""

    def __init__(self, settings: TokenizerSettings, reading: Reading) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._path = ""
        self._process: BaseProcess = context.Process(target=_serve, args=(theirs, settings, reading), daemon=True)
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
        except (EOFError, ConnectionResetError):
            raise self._died() from None
        if isinstance(answer, Exception):
            raise answer
        found, is_worn = answer
        return found, bool(is_worn)

    def _died(self) -> DataError:
        self._process.join(_SECONDS_TO_DIE)
        code = self._process.exitcode or 0
        what = f"was ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
        why = "; the machine may be out of memory: set data.num_workers lower" if code == -signal.SIGKILL else ""
        return DataError(f"a process of data.num_workers {what} while it encoded {self._path}{why}")

    def kill(self) -> None:
        # It holds nothing that is worth more than the time to end in order.
        self._process.kill()
        self._process.join(_SECONDS_TO_DIE)


def _serve(connection: Connection[Any, Any], settings: TokenizerSettings, reading: Reading) -> None:
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

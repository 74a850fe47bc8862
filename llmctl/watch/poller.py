"""Threads that read a source again and again, so that the keys never wait for it."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from llmctl.errors import LlmctlError

Answer = TypeVar("Answer")


class Poller(Generic[Answer]):
    """Calls ``read`` in a thread of its own, and hands on each answer or the words of its failure.

    A thread that hangs in a connection ends with the process: nothing waits for it.

    Attributes:
        problem: words of the last failure; empty after an answer.
    """

    def __init__(
        self, read: Callable[[], Answer], tell: Callable[[Answer | None, str], object], interval_s: float
    ) -> None:
        """Read by ``read`` every ``interval_s`` seconds.

        Args:
            read: the call; may take any time, and may raise.
            tell: given the answer and "", or None and the words of a failure. Called in the thread.
            interval_s: seconds between an answer and the next call.
        """
        self.problem = ""
        self._read = read
        self._tell = tell
        self._interval_s = interval_s
        self._due = threading.Event()
        self._may_read = threading.Event()
        self._has_ended = False
        self._asked: float | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Read now, and from now on."""
        self._may_read.set()
        if not self._thread.is_alive() and not self._has_ended:
            self._thread.start()
        else:
            self._due.set()

    def pause(self) -> None:
        """Read nothing until the next ``start``."""
        self._may_read.clear()

    def end(self) -> None:
        """Read nothing more; does not wait for a call that is under way."""
        self._has_ended = True
        self._may_read.set()
        self._due.set()

    def ask(self) -> None:
        """Read again at once."""
        self._due.set()

    @property
    def waits_s(self) -> float:
        """Seconds since the call that is under way; 0 if there is none."""
        asked = self._asked
        return time.monotonic() - asked if asked is not None else 0.0

    def _run(self) -> None:
        # The screen may be gone when an answer comes.
        with suppress(RuntimeError):
            while True:
                self._may_read.wait()
                if self._has_ended:
                    return
                self._due.clear()
                self._asked = time.monotonic()
                answer, self.problem = self._call()
                self._asked = None
                if self._has_ended:
                    return
                self._tell(answer, self.problem)
                self._due.wait(self._interval_s)

    def _call(self) -> tuple[Answer | None, str]:
        try:
            return self._read(), ""
        except LlmctlError as error:
            return None, error.message
        except Exception as error:  # a screen that shows other runs must not end for it
            return None, f"internal error: {type(error).__name__}: {error}; llmctl status --debug shows where"

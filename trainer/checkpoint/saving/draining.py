"""A thread that writes a staged save beside the training. Torch-free."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Outcome = TypeVar("Outcome")


class Draining(Generic[Outcome]):
    """At most one piece of work in a thread of its own, whose outcome the main thread takes.

    The thread is a daemon: a process that leaves at once does not wait for it.
    """

    def __init__(self) -> None:
        """Work on nothing yet."""
        self._thread: threading.Thread | None = None
        self._outcomes: list[Outcome] = []
        self._error: BaseException | None = None

    def begin(self, work: Callable[[], Outcome]) -> None:
        """Start ``work``. The outcome of the last one was taken."""
        assert self._thread is None, "the outcome of the last work was not taken"
        self._thread = threading.Thread(target=self._run, args=(work,), name="save", daemon=True)
        self._thread.start()

    @property
    def is_pending(self) -> bool:
        """True from ``begin`` until ``take``."""
        return self._thread is not None

    @property
    def has_ended(self) -> bool:
        """True if there is an outcome to take without waiting."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end of the work, if any."""
        if self._thread is not None:
            self._thread.join()

    def take(self) -> Outcome:
        """Wait for the outcome of the work, and return it.

        Raises:
            Exception: that of the work.
        """
        self.wait()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._outcomes.pop()

    def _run(self, work: Callable[[], Outcome]) -> None:
        try:
            self._outcomes.append(work())
        except BaseException as error:
            # Every kind: the main thread raises it.
            self._error = error

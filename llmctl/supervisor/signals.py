"""Signals as values, read in the main loop."""

import os
import select
import signal
from types import FrameType
from typing import List, Optional

_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """Signals that this process receives.

    SIGHUP is ignored in this process and in every process that it starts.
    """

    def __init__(self) -> None:
        """Install the signal handlers."""
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        for number in (*_WATCHED, signal.SIGCHLD):
            signal.signal(number, _nothing)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def wait(self, seconds: float) -> List[str]:
        """Wait; returns the names (TERM, INT, USR1, USR2) of the signals received.

        Returns early for a signal and at the end of a child.
        """
        select.select([self._reader], [], [], seconds)
        try:
            numbers = os.read(self._reader, 4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number).name[3:] for number in numbers if number in _WATCHED]


def _nothing(number: int, frame: Optional[FrameType]) -> None:
    """Do nothing: the wake-up descriptor already holds the number."""

"""Processes that end when who started them ends, in whatever way, and whatever they do or hang in then."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process once the thread that started it is gone (prctl(2), PR_SET_PDEATHSIG).

    Elsewhere than on Linux nothing happens: a process then ends when it finds its pipe closed, if it looks.

    Args:
        parent: process that is to be outlived by nobody. If it has ended already, this does not come back.
    """
    # There is no C library to ask, or it has no such call.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)

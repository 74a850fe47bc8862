"""Processes that end with their parent."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its starting thread ends (prctl(2), PR_SET_PDEATHSIG).

    Has no effect except on Linux: elsewhere a process ends when it finds its pipe closed.

    Args:
        parent: process id of the parent. If the parent has ended already, this function exits the process.
    """
    # Without a C library, or without this call in it.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)

"""Background threads that Ctrl-C ends at once, and processes that end with their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar

_Result = TypeVar("_Result")
_BEAT_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


class StillRunning(KeyboardInterrupt):
    """Ctrl-C while the work continues in its thread.

    Leave by ``os._exit``, because nothing else ends the thread.
    """


def do_in_background(work: Callable[[], _Result], beat: Callable[[], object]) -> _Result:
    """Run ``work`` in a thread and return its result.

    The main thread stays free for signals, which Python delivers to it only.

    Args:
        work: function to run.
        beat: called in this thread about every second until ``work`` is done.

    Raises:
        StillRunning: Ctrl-C was pressed.
        BaseException: any exception of ``work``.
    """
    result: Future[_Result] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # raised again in the waiting thread
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        while not wait([result], _BEAT_SECONDS).done:
            beat()
        return result.result()
    except KeyboardInterrupt:
        if result.done():
            raise
        raise StillRunning from None


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

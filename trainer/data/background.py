"""Work in a thread that Ctrl-C ends at once, and processes that end with their parent."""

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


class StillAtWork(KeyboardInterrupt):
    """The user has interrupted, and the work goes on in its thread: leave by ``os._exit``, as nobody else ends it."""


def do_in_background(work: Callable[[], _Result], beat: Callable[[], object]) -> _Result:
    """The result of ``work``, done in a thread of its own: Python hears of signals in the main thread alone.

    Args:
        work: what is done.
        beat: called here about every second until it is done.

    Raises:
        StillAtWork: Ctrl-C was pressed.
        BaseException: what ``work`` raises.
    """
    result: Future[_Result] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # all of it is raised where it is waited for
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        while not wait([result], _BEAT_SECONDS).done:
            beat()
        return result.result()
    except KeyboardInterrupt:
        if result.done():
            raise
        raise StillAtWork from None


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

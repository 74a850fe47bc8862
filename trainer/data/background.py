"""Work that Ctrl-C ends at once, though the library that does it would hear of it only when it is done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

_Result = TypeVar("_Result")
_BEAT_SECONDS = 1.0


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

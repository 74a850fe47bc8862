"""What a failing rank leaves behind, so that the first to fail can be told from those it took along. Torch-free."""

from __future__ import annotations

import contextlib
import socket
import time
import traceback

from trainer.run_directory import RunDirectory, write_json


class PeerFailedError(RuntimeError):
    """Another rank has failed and said so; this one leaves because of it and has nothing of its own to report."""


def record_failure(run: RunDirectory | None, rank: int, coordinates: str, iteration: int, error: BaseException) -> None:
    """Write errors/rank-NNNNN.json. ``time`` is now: call it before anything that may wait for other ranks.

    The rank with the smallest time failed first; the others mostly report that a connection to it broke.
    """
    if run is None or isinstance(error, PeerFailedError):
        return
    # The disk may be what failed; the traceback on stderr must still come out.
    with contextlib.suppress(OSError):
        write_json(
            run.error(rank),
            {
                "rank": rank,
                "coordinates": coordinates,
                "host": socket.gethostname(),
                "iteration": iteration,
                "type": type(error).__name__,
                "message": str(error),
                "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
                "time": time.time(),
            },
        )

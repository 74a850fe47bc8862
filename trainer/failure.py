"""What a failing rank leaves behind, so that the first to fail can be told from those it took along. Torch-free."""

from __future__ import annotations

import contextlib
import socket
import time
import traceback
from dataclasses import asdict, dataclass

from trainer.run_directory import RunDirectory, write_json


class PeerFailedError(RuntimeError):
    """Another rank has failed and said so; this one leaves because of it and has nothing of its own to report."""


@dataclass(frozen=True)
class FailureRecord:
    """Content of errors/rank-NNNNN.json.

    Attributes:
        consequence: the rank only noticed that others had gone or did not answer; the cause is with another one.
        time: when it failed, in seconds since the epoch; the smallest of those that are no consequence is the cause's.
        exit_code: that the rank leaves with. The supervisor looks for the cause's code, which is the job's, whatever a
            launcher makes of it.
    """

    rank: int
    coordinates: str
    host: str
    iteration: int
    type: str
    message: str
    traceback: str
    consequence: bool
    time: float
    exit_code: int

    def write(self, run: RunDirectory | None) -> None:
        """Put it into the run directory; nowhere without one, or where the disk is what failed."""
        if run is not None:
            # The traceback on stderr must still come out.
            with contextlib.suppress(OSError):
                write_json(run.error(self.rank), asdict(self))


def record_failure(
    run: RunDirectory | None,
    rank: int,
    coordinates: str,
    iteration: int,
    error: BaseException,
    *,
    exit_code: int = 1,
    consequence: str = "",
) -> FailureRecord | None:
    """Write errors/rank-NNNNN.json. ``time`` is now: call it before anything that may wait for other ranks.

    Args:
        run: the run directory, if there is one.
        rank: this rank.
        coordinates: the rank with its place on the axes, for people.
        iteration: iterations done.
        error: what it fails with.
        exit_code: that it leaves with.
        consequence: where the cause is with another rank: what to say instead of the error's own message.

    Returns:
        What was written; None for PeerFailedError, of which the other rank says all.
    """
    if isinstance(error, PeerFailedError):
        return None
    record = FailureRecord(
        rank=rank,
        coordinates=coordinates,
        host=socket.gethostname(),
        iteration=iteration,
        type=type(error).__name__,
        message=consequence or str(error),
        traceback="".join(traceback.format_exception(type(error), error, error.__traceback__)),
        consequence=bool(consequence),
        time=time.time(),
        exit_code=exit_code,
    )
    record.write(run)
    return record

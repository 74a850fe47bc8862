"""Failure records of ranks, which separate the first failure from its consequences. Torch-free."""

from __future__ import annotations

import contextlib
import socket
import time
import traceback
from dataclasses import asdict, dataclass

from trainer.process.run_directory import RunDirectory, write_json


class PeerFailedError(RuntimeError):
    """Another rank has failed and written its record; this rank exits without a record."""


class NodeError(RuntimeError):
    """A node is not fit for the job. The message is one sentence.

    Attributes:
        culprits: names of the nodes at fault; empty if the cause is a folder or a setting.
    """

    def __init__(self, sentence: str, culprits: tuple[str, ...] = ()) -> None:
        super().__init__(sentence)
        self.culprits = culprits


@dataclass(frozen=True)
class FailureRecord:
    """Content of errors/rank-NNNNN.json.

    Attributes:
        consequence: True if the rank only noticed that other ranks had ended or did not answer.
        time: time of the failure in seconds since the epoch. The cause has the smallest time among the records that
            are not consequences.
        module: module of the exception's class, which tells the trainer's own errors from others.
        culprits: names of the nodes at fault, where the preflight has found that out.
        exit_code: exit code of the rank. The supervisor reads the record, so that the job exits with the code of the
            cause, whatever the launcher returns.
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
    module: str
    culprits: tuple[str, ...] = ()

    def write(self, run: RunDirectory | None) -> None:
        """Write the record into the run directory, if possible."""
        if run is not None:
            # A failing disk must not hide the traceback on stderr.
            with contextlib.suppress(OSError):
                try:
                    write_json(run.error(self.rank), asdict(self))
                except OSError:
                    # The supervisor keeps room for the records of a run that a full disk ends.
                    run.reserve.unlink(missing_ok=True)
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
    """Write errors/rank-NNNNN.json, with the current time as the time of the failure.

    Call it before anything that may wait for other ranks.

    Args:
        run: the run directory; None: no run directory.
        rank: this rank.
        coordinates: the rank with its coordinates on the mesh, for the message.
        iteration: number of completed iterations.
        error: the exception.
        exit_code: exit code of this rank.
        consequence: message that replaces the error's own if the cause is on another rank; empty otherwise.

    Returns:
        The record; None for PeerFailedError, because the other rank has written the record.
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
        module=type(error).__module__,
        culprits=error.culprits if isinstance(error, NodeError) else (),
    )
    record.write(run)
    return record

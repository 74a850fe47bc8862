"""Communication that failed because of other ranks: over which axis, in which phase, and who is silent. Torch-free.

A rank that is killed says nothing; its peers find their connections closed. A rank that hangs says nothing either; its
peers time out. Both name the ranks of their group that leave no error record of their own, with their last heartbeat.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.mesh import ParallelMesh
    from trainer.run_directory import RunDirectory

_GONE = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection refused",
    "socket",
    "remote process exited",
    "communicator was aborted",
    "recv returned 0",
    "failed to recv",
)
"""How gloo, NCCL and torch's store word it when the other side of a connection is no more."""
_LATE = ("timed out", "timeout")
_GOSSIP = re.compile(r"\. This is typically caused by.*", re.DOTALL)
_SOURCE_PLACE = re.compile(r"^\[[^\]]*:\d+\] ")

# Where a communication was started -> the axis that it runs over; the first that fits counts.
_AXES = (
    ("trainer.tensor_parallel", "tp"),
    ("trainer.context_parallel", "cp"),
    ("trainer.moe", "ep"),
    ("trainer.pipeline", "pp"),
    ("trainer.data_parallel.shared_gradients", ""),
    ("trainer.data_parallel", "dp_cp"),
)

GONE_PATIENCE_S = 1.0
LATE_PATIENCE_S = 2.0
"""How long to wait for other ranks' records: those that wait for the same rank time out at nearly the same moment."""
_MOST_LISTED = 8
_MOST_NAMED = 4


@dataclass(frozen=True)
class PeerLoss:
    """A communication that failed because of other ranks.

    Attributes:
        is_late: they did not answer in time; otherwise their connections are closed.
        axis: name of the axis it ran over; empty where that cannot be told.
        peers: the other ranks that it ran between; all others where the axis cannot be told.
        phase: what this rank was doing.
        said: the backend's own words.
    """

    is_late: bool
    axis: str
    peers: tuple[int, ...]
    phase: str
    said: str

    @classmethod
    def of(cls, error: BaseException, mesh: ParallelMesh, phase: str) -> PeerLoss | None:
        """What ``error`` says of other ranks, or None if it says nothing of them and is a cause of its own."""
        said = _GOSSIP.sub("", _SOURCE_PLACE.sub("", str(error)))
        words = said.lower()
        is_late = any(word in words for word in _LATE)
        # torch.distributed raises RuntimeError and its subclasses; an OSError is a file's or a user's connection.
        if not isinstance(error, RuntimeError) or not (is_late or any(word in words for word in _GONE)):
            return None
        axis = _axis_of(error)
        ranks: Sequence[int] = getattr(mesh, f"{axis}_ranks") if axis else range(mesh.world_size)
        return cls(is_late, axis, tuple(rank for rank in ranks if rank != mesh.rank), phase, said)

    def sentence(self, mesh: ParallelMesh, run: RunDirectory | None, silent: Sequence[int] = ()) -> str:
        """What happened, in one line.

        Args:
            mesh: this rank's.
            run: where heartbeats lie.
            silent: the peers that may be the cause; empty where unknown.
        """
        over = f" over {self.axis.replace('_', ' x ')}" if self.axis else ""
        ranks = ", ".join(map(str, self.peers[:_MOST_LISTED])) + ", ..." * (len(self.peers) > _MOST_LISTED)
        what = "waited in vain for its peers" if self.is_late else "lost its peers"
        sentence = f"{what} in {self.phase!r}{over} (rank {ranks}): {self.said}"
        if not silent:
            return sentence
        named = ", ".join(mesh.describe(rank) + _last_heard_of(run, rank) for rank in silent[:_MOST_NAMED])
        more = f" and {len(silent) - _MOST_NAMED} more" if len(silent) > _MOST_NAMED else ""
        return f"{sentence}; no word from {named}{more}"

    def silent_peers(self, run: RunDirectory | None) -> tuple[int, ...]:
        """The peers that leave no error record within a moment; nobody where there is no run directory."""
        if run is None:
            return ()
        end = time.monotonic() + (LATE_PATIENCE_S if self.is_late else GONE_PATIENCE_S)
        while True:
            silent = tuple(rank for rank in self.peers if not run.error(rank).exists())
            if not silent or time.monotonic() >= end:
                return silent
            time.sleep(0.05)


def _axis_of(error: BaseException) -> str:
    """The axis of the innermost frame that is known to talk over one."""
    axis = ""
    trace = error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__", "")
        known = next((name for prefix, name in _AXES if f"{module}.".startswith(f"{prefix}.")), None)
        axis = axis if known is None else known
        trace = trace.tb_next
    return axis


def _last_heard_of(run: RunDirectory | None, rank: int) -> str:
    """In parentheses: its process and its last heartbeat."""
    if run is None:
        return ""
    with suppress(OSError, ValueError, KeyError, TypeError):
        beat = json.loads(run.heartbeat(rank).read_text(encoding="utf-8"))
        age = time.time() - float(beat["time"])
        return (
            f" (process {beat['pid']} on {beat['host']}, last heard of {age:.1f} s ago, when it began "
            f"{beat['phase']!r} after iteration {beat['iteration']})"
        )
    return " (never heard of)"

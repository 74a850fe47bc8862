"""Communication that failed because of other ranks: over which axis, in which phase, and who is silent. Torch-free.

A rank that is killed says nothing; its peers find their connections closed. A rank that hangs says nothing either; its
peers time out. Both name the ranks of their group that leave no error record of their own, with their last heartbeat.

So it is with gloo, and with NCCL while ranks meet and connect. Later NCCL's own watchdog ends the process with SIGABRT,
for a lost peer and for a timeout alike, while the main thread waits for the GPU and hears of neither
(TORCH_NCCL_ASYNC_ERROR_HANDLING, by default 3). No error record is written then. What the rank leaves is its log, with
the watchdog's words and where each thread stood (trainer.process.rank_log), and the phase in its heartbeat. A record
from a thread of ours would have to come before, by the clock alone, and would accuse whoever evaluates or saves for
long.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.checkpoint.directory import CheckpointError

if TYPE_CHECKING:
    from trainer.distributed.mesh import ParallelMesh
    from trainer.process.run_directory import RunDirectory

_GONE = (
    "connection closed by peer",
    "connection closed by remote peer",
    "connection reset by peer",
    "connection refused",
    "connection was likely closed",
    "broken pipe",
    "got 0 bytes",
    "socket closed",
    "remote process exit",
    "communicator was aborted",
)
"""How gloo, NCCL and torch's store word it when the other side of a connection is no more.

Whole phrases, because a rank that cannot open a socket of its own, or finds no interface, is a cause.
"""
_LATE = (
    "timed out waiting",
    "timed out after",
    "timed out connecting",
    "connection timed out",
    "timeout caused pair closure",
    "wait timeout after",
    "socket timeout",
    "caught collective operation timeout",
)
"""How they word it when it does not answer. Of kernels that take too long CUDA says: timed out and was terminated."""
_GOSSIP = re.compile(r"\. This is typically caused by.*", re.DOTALL)
_SOURCE_PLACE = re.compile(r"^\[[^\]]*:\d+\] ")

# Where a communication was started -> the axis that it runs over; the first that fits counts.
_AXES = (
    ("trainer.model.tensor_parallel", "tp"),
    ("trainer.model.context_parallel", "cp"),
    ("trainer.model.moe.losses", "cp"),
    ("trainer.model.moe", "ep"),
    ("trainer.pipeline.communication", "pp"),
    ("trainer.data_parallel.shared_gradients", ""),
    ("trainer.data_parallel", "dp_cp"),
    ("torch.distributed.fsdp", "dp_cp"),
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
        """What ``error`` says of other ranks, or None if it says nothing of them and is a cause of its own.

        Where there are no other ranks every error is a cause.
        """
        said = _GOSSIP.sub("", _SOURCE_PLACE.sub("", str(error)))
        words = said.lower()
        is_late = any(word in words for word in _LATE)
        # torch.distributed raises RuntimeError and its subclasses; an OSError is a file's or a user's connection, and a
        # CheckpointError quotes one.
        if not isinstance(error, RuntimeError) or isinstance(error, CheckpointError):
            return None
        if not (is_late or any(word in words for word in _GONE)):
            return None
        others = tuple(rank for rank in range(mesh.world_size) if rank != mesh.rank)
        axis = _axis_of(error)
        peers = tuple(rank for rank in getattr(mesh, f"{axis}_ranks") if rank != mesh.rank) if axis else ()
        # A place that talks over an axis of one rank talked to somebody else.
        axis, peers = (axis, peers) if peers else ("", others)
        return cls(is_late, axis, peers, phase, said) if peers else None

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

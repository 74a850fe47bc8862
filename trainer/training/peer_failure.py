"""Peer failures: failed communication with its axis, its phase and the silent peers. Torch-free.

A killed rank leaves no error record; its peers find their connections closed. A hanging rank leaves none either; its
peers time out. In both cases the peers name the ranks of their group without an error record, with their last
heartbeat.

This holds with gloo, and with NCCL during rendezvous and connection. Later NCCL's own watchdog ends the process with
SIGABRT, after a peer failure and after a timeout alike, while the main thread waits for the GPU and notices neither
(TORCH_NCCL_ASYNC_ERROR_HANDLING, by default 3). No error record is written then. The rank leaves its log, with the
watchdog's message and the stack of each thread (trainer.process.rank_log), and the phase in its heartbeat. A thread of
the trainer would have to write a record earlier, by the clock alone, and would blame ranks with a long evaluation or
save.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.checkpoint.directory import CheckpointError
from trainer.process.lost_peer import backend_words, lost_peer
from trainer.training.missing_nodes import missing_nodes

if TYPE_CHECKING:
    from trainer.distributed.mesh import ParallelMesh
    from trainer.process.run_directory import RunDirectory

# Module that started a communication -> axis of the communication; the first match counts.
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

GONE_TIMEOUT_S = 1.0
LATE_TIMEOUT_S = 2.0
"""Longest wait for other ranks' records: ranks that wait for the same rank time out at nearly the same moment."""
_MOST_LISTED = 8
_MOST_NAMED = 4


@dataclass(frozen=True)
class PeerFailure:
    """A communication that failed because of other ranks.

    Attributes:
        is_late: the peers did not answer in time; otherwise their connections are closed.
        axis: name of the communication's axis; empty if unknown.
        peers: the other ranks of the communication; all other ranks if the axis is unknown.
        phase: this rank's phase.
        backend_message: the backend's own words.
    """

    is_late: bool
    axis: str
    peers: tuple[int, ...]
    phase: str
    backend_message: str

    @classmethod
    def of(cls, error: BaseException, mesh: ParallelMesh, phase: str) -> PeerFailure | None:
        """The peer failure behind ``error``; None if the cause is on this rank.

        Without other ranks every error is a cause.
        """
        message = backend_words(error)
        lost = lost_peer(message)
        # torch.distributed raises RuntimeError and its subclasses. An OSError comes from a file or a user's connection,
        # and a CheckpointError quotes an OSError.
        if not isinstance(error, RuntimeError) or isinstance(error, CheckpointError):
            return None
        if lost is None:
            return None
        others = tuple(rank for rank in range(mesh.world_size) if rank != mesh.rank)
        axis = _axis_of(error)
        peers = tuple(rank for rank in getattr(mesh, f"{axis}_ranks") if rank != mesh.rank) if axis else ()
        # A module that communicates over an axis of size 1 must have communicated over another axis.
        axis, peers = (axis, peers) if peers else ("", others)
        return cls(lost == "late", axis, peers, phase, message) if peers else None

    def sentence(self, mesh: ParallelMesh, run: RunDirectory | None, silent: Sequence[int] = ()) -> str:
        """Description of the peer failure in one line.

        Args:
            mesh: this rank's.
            run: contains the heartbeats.
            silent: the peers that may be the cause; empty if unknown.
        """
        over = f" over {self.axis.replace('_', ' x ')}" if self.axis else ""
        ranks = ", ".join(map(str, self.peers[:_MOST_LISTED])) + ", ..." * (len(self.peers) > _MOST_LISTED)
        what = "peer timeout" if self.is_late else "peer failure"
        sentence = f"{what} in {self.phase!r}{over} (rank {ranks}): {self.backend_message}"
        if not silent:
            return sentence
        named = ", ".join(mesh.describe(rank) + _last_heartbeat(run, rank) for rank in silent[:_MOST_NAMED])
        more = f" and {len(silent) - _MOST_NAMED} more" if len(silent) > _MOST_NAMED else ""
        missing = ""
        if run is not None and not all(run.heartbeat(rank).exists() for rank in silent):
            missing = missing_nodes(run, mesh.rank)
        return "; ".join(part for part in (sentence, f"no error record from {named}{more}", missing) if part)

    def silent_peers(self, run: RunDirectory | None) -> tuple[int, ...]:
        """The peers that leave no error record within a moment.

        Empty without a run directory.
        """
        if run is None:
            return ()
        end = time.monotonic() + (LATE_TIMEOUT_S if self.is_late else GONE_TIMEOUT_S)
        while True:
            silent = tuple(rank for rank in self.peers if not run.error(rank).exists())
            if not silent or time.monotonic() >= end:
                return silent
            time.sleep(0.05)


def axis_of_module(module: str) -> str | None:
    """Axis over which a module communicates; empty if the axis is unknown, None for a module that does not."""
    return next((axis for prefix, axis in _AXES if f"{module}.".startswith(f"{prefix}.")), None)


def _axis_of(error: BaseException) -> str:
    """The axis of the innermost frame whose module communicates over a known axis."""
    axis = ""
    trace = error.__traceback__
    while trace is not None:
        known = axis_of_module(trace.tb_frame.f_globals.get("__name__", ""))
        axis = axis if known is None else known
        trace = trace.tb_next
    return axis


def _last_heartbeat(run: RunDirectory | None, rank: int) -> str:
    """Process and last heartbeat of ``rank``, in parentheses."""
    if run is None:
        return ""
    with suppress(OSError, ValueError, KeyError, TypeError):
        beat = json.loads(run.heartbeat(rank).read_text(encoding="utf-8"))
        age = time.time() - float(beat["time"])
        return (
            f" (process {beat['pid']} on {beat['host']}, last heartbeat {age:.1f} s ago, at the start of "
            f"{beat['phase']!r} after iteration {beat['iteration']})"
        )
    return " (no heartbeat)"

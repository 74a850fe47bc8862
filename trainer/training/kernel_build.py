"""Progress of a build of kernels in the heartbeat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.ops.build.build_settings import LineReport
from trainer.process.heartbeat import KERNEL_BUILD

if TYPE_CHECKING:
    from trainer.process.heartbeat import Heartbeat


class HeartbeatReport(LineReport):
    """Show the progress of a build as this rank's phase."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat

    def progress(self, share: float | None) -> None:
        """Begin the phase of the new percentage; None: that of a rank that waits for others."""
        self._heartbeat.beat(0, KERNEL_BUILD if share is None else f"{KERNEL_BUILD} {int(100 * share)}%")

"""Node status files, by which nodes of a preparation report to each other.

A file is named by node and attempt.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from trainer.data.errors import DataError

TERMINATED = "ended by SIGTERM"
_BEAT_SECONDS = 10.0
_SECONDS_TO_REPORT = 3.0
"""Wait for another node's failure report: Slurm gives 30 s from SIGTERM to SIGKILL (KillWait)."""


class Terminated(BaseException):
    """SIGTERM from a scheduler, a user, or a launcher that ends all nodes."""


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Raise Terminated on SIGTERM, within the context."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals only to the main thread
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class NodeStatusFiles:
    """The status files of one attempt. A preparation on one node has none.

    Args:
        folder: folder of the preparation.
        node: number of this node among ``nodes``.
        nodes: number of nodes.
        attempt: see Preparation.
    """

    def __init__(self, folder: Path, node: int = 0, nodes: int = 1, attempt: str = "") -> None:
        self.folder = folder
        self.node = node
        self.nodes = nodes
        self._attempt = hashlib.sha256(attempt.encode()).hexdigest()[:16]
        self._last_beat = 0.0

    def _path(self, kind: str, node: int) -> Path:
        return self.folder / f"node-{node}-{self._attempt}.{kind}"

    def forget(self) -> None:
        """Remove the status files of an earlier process of this node."""
        for kind in ("failed", "done"):
            self._path(kind, self.node).unlink(missing_ok=True)
        self._touch_alive()

    def beat(self) -> None:
        """Report that this node is at work; call periodically.

        Raises:
            DataError: this is the first node, and another node, needed for the output, has failed.
        """
        if self.nodes == 1 or time.monotonic() - self._last_beat < _BEAT_SECONDS:
            return
        self._touch_alive()
        failure = self.failure() if self.node == 0 else None
        if failure is not None:
            raise DataError(failure)

    def _touch_alive(self) -> None:
        if self.nodes > 1:
            self._last_beat = time.monotonic()
            with suppress(OSError):  # a full disk is reported elsewhere
                self._path("alive", self.node).touch()

    def heartbeats(self) -> list[int | None]:
        """Return the last heartbeat of each node; None for never.

        Times are in nanoseconds of the file system's clock.
        """
        times: list[int | None] = []
        for node in range(self.nodes):
            try:
                times.append(self._path("alive", node).stat().st_mtime_ns)
            except FileNotFoundError:
                times.append(None)
        return times

    def arrive(self) -> None:
        """Report that this node writes no more in this attempt."""
        self._path("done", self.node).touch()

    def unfinished_nodes(self) -> list[int]:
        """Return the nodes that have not arrived."""
        with os.scandir(self.folder) as entries:
            found = {entry.name for entry in entries}
        return [node for node in range(self.nodes) if self._path("done", node).name not in found]

    def fail(self, reason: str) -> None:
        """Report why this node ends early; the journal's folder may not exist yet."""
        if self.nodes > 1:
            partial = self._path("failed", self.node).with_suffix(".partial")
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                partial.write_text(reason, encoding="utf-8", errors="replace")
                partial.replace(self._path("failed", self.node))

    @contextmanager
    def reported_failure(self) -> Iterator[None]:
        """Report an error that ends the context to the other nodes."""
        try:
            yield
        except Terminated:
            raise  # the failed node has reported the reason
        except BaseException as error:
            self.fail("interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__)
            raise

    def wait_for_failure(self) -> str | None:
        """Wait briefly for the failure that caused the SIGTERM; None without a report."""
        if self.nodes == 1:
            return None
        deadline = time.monotonic() + _SECONDS_TO_REPORT
        while (found := self.failure()) is None and time.monotonic() < deadline:
            time.sleep(0.2)
        return found

    def failure(self) -> str | None:
        """Return the failure report of the first failed node, if any."""
        for node in range(self.nodes):
            with suppress(FileNotFoundError):
                return f"node {node} failed: {self._path('failed', node).read_text(encoding='utf-8')}"
        return None

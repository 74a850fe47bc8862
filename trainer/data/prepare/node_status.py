"""What nodes that share a preparation tell each other: small files in its folder, named by node and attempt."""

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

TOLD_TO_END = "told to end by SIGTERM"
_BEAT_SECONDS = 10.0
_SECONDS_TO_TELL = 3.0
"""So long is waited for what another node has written: Slurm gives 30 s from SIGTERM to SIGKILL (KillWait)."""


class ToldToEnd(BaseException):
    """SIGTERM has come: from a scheduler or a user, or from a launcher that ends all nodes once one has failed."""


@contextmanager
def heeding_sigterm() -> Iterator[None]:
    """Raise ToldToEnd where SIGTERM comes."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise ToldToEnd

    if threading.current_thread() is not threading.main_thread():
        yield  # Python has no signals there
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class NodeMarks:
    """The marks of one start of all nodes. Of a preparation on one node there are none.

    Args:
        folder: of the preparation.
        node: our number among ``nodes``.
        nodes: that work in it.
        attempt: see Preparation.
    """

    def __init__(self, folder: Path, node: int = 0, nodes: int = 1, attempt: str = "") -> None:
        self.folder = folder
        self.node = node
        self.nodes = nodes
        self._attempt = hashlib.sha256(attempt.encode()).hexdigest()[:16]
        self._beaten = 0.0

    def _path(self, kind: str, node: int) -> Path:
        return self.folder / f"node-{node}-{self._attempt}.{kind}"

    def forget(self) -> None:
        """Take back what an earlier process of ours told the others."""
        for kind in ("failed", "done"):
            self._path(kind, self.node).unlink(missing_ok=True)
        self._tell_alive()

    def beat(self) -> None:
        """Tell the others that we are at work; to be called now and then.

        Raises:
            DataError: we are the first node, and another one has failed, without which there is no output.
        """
        if self.nodes == 1 or time.monotonic() - self._beaten < _BEAT_SECONDS:
            return
        self._tell_alive()
        failure = self.failure() if self.node == 0 else None
        if failure is not None:
            raise DataError(failure)

    def _tell_alive(self) -> None:
        if self.nodes > 1:
            self._beaten = time.monotonic()
            with suppress(OSError):  # the disk may be full, which is not told by this
                self._path("alive", self.node).touch()

    def signs_of_life(self) -> list[int | None]:
        """When each node last told that it is at work, in nanoseconds of the file system's clock; None: never."""
        times: list[int | None] = []
        for node in range(self.nodes):
            try:
                times.append(self._path("alive", node).stat().st_mtime_ns)
            except FileNotFoundError:
                times.append(None)
        return times

    def arrive(self) -> None:
        """Tell the others that we write no more in this attempt."""
        self._path("done", self.node).touch()

    def absent(self) -> list[int]:
        """The nodes that have not said so."""
        with os.scandir(self.folder) as entries:
            found = {entry.name for entry in entries}
        return [node for node in range(self.nodes) if self._path("done", node).name not in found]

    def fail(self, reason: str) -> None:
        """Tell the others why we end before we are done; they may not have made the folder yet."""
        if self.nodes > 1:
            partial = self._path("failed", self.node).with_suffix(".partial")
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                partial.write_text(reason, encoding="utf-8", errors="replace")
                partial.replace(self._path("failed", self.node))

    @contextmanager
    def told(self) -> Iterator[None]:
        """Tell the others why what is done within ends, if an error ends it."""
        try:
            yield
        except ToldToEnd:
            raise  # why stands with the node that failed
        except BaseException as error:
            self.fail("interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__)
            raise

    def why_told_to_end(self) -> str | None:
        """What a node has said that failed, and takes the others along; waits a little for it. None: it was none."""
        if self.nodes == 1:
            return None
        deadline = time.monotonic() + _SECONDS_TO_TELL
        while (found := self.failure()) is None and time.monotonic() < deadline:
            time.sleep(0.2)
        return found

    def failure(self) -> str | None:
        """What a node has said so."""
        for node in range(self.nodes):
            with suppress(FileNotFoundError):
                return f"node {node} failed: {self._path('failed', node).read_text(encoding='utf-8')}"
        return None

"""Heartbeat file of each rank: its current phase and the phase's start time. Torch-free."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from trainer.process.connections import Connections, read_connections
from trainer.process.run_directory import write_json
from trainer.process.stacks import StackWriter, watch_interpreter

_SECONDS_BETWEEN_WRITES = 1.0
SECONDS_BETWEEN_SIGNS = 5.0
"""Longest age of ``written`` in the file of a rank whose process runs."""
_SILENT_S = 3.0
"""Time without progress from which on the rank looks for a request for its stacks."""
_WAITING_S = 2.0
"""Time in one collective from which on the rank looks for peers that do not answer. Steps go on sooner."""
_PAGE_BYTES = 4096
KERNEL_BUILD = "building the kernels"
"""Phase of the ranks while kernels are built. The rank that builds adds the percent, the others wait (state.py)."""
_WARNING_IF_FULL = 1000


@dataclass(frozen=True)
class CollectivesEntered:
    """Numbers of the collectives that a rank has entered, and the collective that its main thread is in.

    Attributes:
        groups: name of a group -> its first rank, which tells the groups of an axis apart, and the number of the last
            collective in this group that the rank has entered.
        inside: name of the collective that the rank is in, such as all_reduce; empty outside of any.
        group: name of that collective's group; empty if unknown.
    """

    groups: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    inside: str = ""
    group: str = ""


class Heartbeat:
    """Keeps a file up to date with this rank's iteration, phase and collectives.

    A separate thread writes, at most once per second and only after a change. So training never waits for the file
    system, ``time`` is the time of the last progress (a phase, an iteration or a collective), and a rank that hangs in
    a collective records that phase, even if the phase began right after the last write. ``written`` is a sign of life
    of the process itself, every few seconds: a rank that waits writes on, a stopped process or node does not. A rank
    that waits in one collective for seconds adds its addresses and the peers that do not answer, ``network``.
    """

    def __init__(self, path: Path | None, rank: int) -> None:
        """Write to ``path``; None disables writing. Use as a context manager."""
        self._path = path
        self._fixed = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
        self._warnings: dict[str, str] = {}
        self._warning = ""
        self._beside = ""
        self._peak_memory_bytes = 0
        self._save: dict[str, float] = {}
        self._busy: tuple[float, ...] = ()
        self._latest: tuple[int, str, float] = (0, "start", time.time())
        self._read_collectives: Callable[[], CollectivesEntered] = CollectivesEntered
        self._keep_at_hang: Callable[[], None] = lambda: None
        self._collectives = CollectivesEntered()
        self._entered = self._inside_since = 0.0
        self._connections = Connections()
        self._written: tuple[object, ...] | None = None
        self._signed = 0.0
        self._stacks = StackWriter(path.parent.parent, rank) if path is not None else None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def beat(self, iteration: int, phase: str) -> None:
        """Record the start of ``phase``."""
        self._latest = (iteration, phase, time.time())

    def begin_training(self, iteration: int, stage: int) -> None:
        """Record the iteration from which this attempt trains on, and this rank's stage of the pipeline.

        The first step may take much longer than others. Ranks of one stage have the same work.
        """
        self._fixed = {**self._fixed, "first_iteration": iteration, "stage": stage}

    def warn(self, sentence: str, about: str = "checkpoint") -> None:
        """Show a sentence beside the phase from now on; "" takes that about the same back. From any thread."""
        self._warnings[about] = sentence
        self._warning = "; ".join(each for each in list(self._warnings.values()) if each)

    def show_beside(self, what: str) -> None:
        """Show work beside that of the phase, such as a build, from now on; "" takes it back. From any thread."""
        self._beside = what

    def note_memory(self, peak_bytes: int) -> None:
        """Record the most memory that this rank has used so far."""
        self._peak_memory_bytes = peak_bytes

    def note_save(self, iteration: int, size: int, blocked_s: float, written_s: float) -> None:
        """Record the newest complete checkpoint: its bytes, how long the training stood, and how long it took."""
        self._save = {"iteration": iteration, "bytes": size, "blocked_s": blocked_s, "written_s": written_s}

    def note_busy(self, shares: tuple[float, ...]) -> None:
        """Record the shares of the newest windows of time in which this rank did not wait for others, oldest first."""
        self._busy = shares

    def follow(self, read: Callable[[], CollectivesEntered]) -> None:
        """Record the collectives that ``read`` tells of, from now on. The heartbeat's thread calls it each second."""
        self._read_collectives = read

    def keep_at_hang(self, keep: Callable[[], None]) -> None:
        """Call ``keep``, beside writing the stacks, when a hang is told. The heartbeat's thread calls it."""
        self._keep_at_hang = keep

    @property
    def phase(self) -> str:
        """Current phase of this rank."""
        return self._latest[1]

    def __enter__(self) -> Self:
        if self._path is not None:
            self._write()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._path is not None:
            self._end.set()
            self._thread.join(timeout=5.0)
            self._write()

    def _run(self) -> None:
        while not self._end.wait(_SECONDS_BETWEEN_WRITES):
            self._write()
            watch_interpreter()
            is_silent = time.time() - max(self._latest[2], self._entered) > _SILENT_S
            # A hang was told: keep what this rank was doing.
            if is_silent and self._stacks is not None and self._stacks.answer():
                self._keep_at_hang()
        faulthandler.cancel_dump_traceback_later()

    def _write(self) -> None:
        if self._path is None:
            return
        self._note_collectives()
        self._note_connections()
        latest = (
            *self._latest,
            self._warning,
            self._beside,
            self._peak_memory_bytes,
            self._save,
            self._busy,
            self._collectives,
            self._connections.addresses,
            self._connections.peers,
        )
        now = time.time()
        # A step of the clock backwards must not silence the sign.
        is_sign_due = not 0.0 <= now - self._signed < SECONDS_BETWEEN_SIGNS
        if latest == self._written and not is_sign_due:
            return
        values = {**self._values(*self._latest), "written": int(now)}
        # A full or slow disk must not end a training run because of its heartbeat.
        with contextlib.suppress(OSError):
            try:
                if latest == self._written:
                    self._overwrite(self._path, values)
                else:
                    write_json(self._path, values)
            except OSError:
                self._overwrite(self._path, values)
            self._written, self._signed = latest, now

    def _note_collectives(self) -> None:
        before = self._collectives
        # They are torch's own business; a heartbeat without them is better than none.
        with contextlib.suppress(Exception):
            self._collectives = self._read_collectives()
        if self._collectives.groups != before.groups:
            self._entered = time.time()
        if self._collectives != before:
            self._inside_since = time.time()

    def _note_connections(self) -> None:
        waited_s = time.time() - self._inside_since
        self._connections = Connections()
        if self._collectives.inside and waited_s > _WAITING_S:
            # What a kernel does not tell is left out.
            with contextlib.suppress(Exception):
                self._connections = read_connections(waited_s)

    def _values(self, iteration: int, phase: str, moment: float) -> dict[str, object]:
        collectives = self._collectives
        values = {**self._fixed, "iteration": iteration, "phase": phase, "time": max(moment, self._entered)}
        optional: dict[str, object] = {
            "warning": self._warning,
            "beside": self._beside,
            "peak_memory_bytes": self._peak_memory_bytes,
            "save": self._save,
            "busy": list(self._busy),
            "groups": {name: list(entered) for name, entered in collectives.groups.items()},
            "inside": {"name": collectives.inside, "group": collectives.group, "since": self._inside_since}
            if collectives.inside
            else {},
            "network": self._connections.values(),
        }
        return {**values, **{key: value for key, value in optional.items() if value}}

    def _overwrite(self, path: Path, values: dict[str, object]) -> None:
        """Replace the content in place, without a new block of the disk, which may be full.

        One write of less than a page: readers see the old content or the new one.
        """
        text = json.dumps(values).encode()
        if len(text) > _PAGE_BYTES and "warning" in values:
            text = json.dumps({**values, "warning": str(values["warning"])[:_WARNING_IF_FULL]}).encode()
        descriptor = os.open(path, os.O_WRONLY)
        try:
            os.pwrite(descriptor, text.ljust(os.fstat(descriptor).st_size), 0)
        finally:
            os.close(descriptor)

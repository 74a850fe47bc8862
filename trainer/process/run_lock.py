"""Lock of a run directory, held by rank 0 of the attempt that trains in it. Torch-free.

A file with the holder, made by link(2), which is atomic on network file systems too, unlike flock(2). The holder renews
its time. On the holder's own host the process table tells if it lives, from another host only a time that still
changes.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

RENEW_S = 5.0
STALE_S = 60.0
"""Time without a renewal after which a holder on another host counts as dead. File servers fail over in less."""
OLD_S = 3600.0
"""Age after which nobody waits for a renewal, whatever the clocks of the hosts."""
ENDING_S = 5.0
"""Time that a living holder on this host gets to end: a rank without a launcher ends within a second."""


class LockedRunError(RuntimeError):
    """Another process trains in the run directory. The message names its process and host."""


class RunLock:
    """The lock of one folder. A context manager; ``acquire`` first."""

    def __init__(self, path: Path, *, stale_s: float = STALE_S, ending_s: float = ENDING_S) -> None:
        """Lock by the file ``path``."""
        self._path = path
        self._stale_s = stale_s
        self._ending_s = ending_s
        self._token = uuid.uuid4().hex
        self._is_held = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="run lock", daemon=True)

    def acquire(self) -> None:
        """Take the lock, also from a dead holder.

        Raises:
            LockedRunError: the holder lives.
            OSError: the folder cannot be written.
        """
        while not self._make():
            self._wait_for_holder()
        self._is_held = True
        self._thread.start()

    def release(self) -> None:
        """Give the lock back."""
        self._end.set()
        if self._is_held:
            self._thread.join()
            self._is_held = False
            if self._holder().get("token") == self._token:
                with suppress(OSError):
                    self._path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _make(self) -> bool:
        """Make the file, complete from the first moment on: link(2) fails if it exists."""
        aside = self._path.with_name(f".{self._path.name}.{self._token}")
        pid = os.getpid()
        values = {"host": socket.gethostname(), "boot_id": _boot_id(), "pid": pid, "start": _start_time(pid)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps({**values, "token": self._token}), encoding="utf-8")
        try:
            os.link(aside, self._path)
        except FileExistsError:
            return False
        finally:
            aside.unlink()
        return True

    def _wait_for_holder(self) -> None:
        """Remove the file of a dead holder.

        Raises:
            LockedRunError: the holder lives.
        """
        holder = self._holder()
        began, first = time.monotonic(), self._renewed()
        is_here = holder.get("boot_id") is not None and holder.get("boot_id") == _boot_id()
        while holder and self._holder().get("token") == holder.get("token"):
            waited = time.monotonic() - began
            if is_here and _start_time(int(str(holder["pid"]))) != holder.get("start"):
                break
            has_renewed = not is_here and self._renewed() != first
            if has_renewed or (is_here and waited > self._ending_s):
                raise LockedRunError(
                    f"{self._path.parent}: process {holder.get('pid')} on {holder.get('host')} still trains in this "
                    "run directory; end it, or wait for its end, and start again"
                )
            if not is_here and (waited > self._stale_s or abs(time.time() - first) > OLD_S):
                break
            time.sleep(min(0.2, self._ending_s / 5))
        self._remove(holder)

    def _remove(self, holder: dict[str, object]) -> None:
        """Remove the file of ``holder``, but not of another that has taken the lock meanwhile."""
        aside = self._path.with_name(f".{self._path.name}.{self._token}.old")
        with suppress(FileNotFoundError):
            self._path.rename(aside)
            if _read(aside).get("token") != holder.get("token"):
                with suppress(FileExistsError):
                    os.link(aside, self._path)
            aside.unlink()

    def _renew(self) -> None:
        while not self._end.wait(RENEW_S):
            # No content is written: a full disk must not cost the lock.
            with suppress(OSError):
                if self._holder().get("token") == self._token:
                    os.utime(self._path)

    def _holder(self) -> dict[str, object]:
        return _read(self._path)

    def _renewed(self) -> float:
        with suppress(OSError):
            # Opening makes a network file system ask its server (nfs(5), close-to-open consistency).
            descriptor = os.open(self._path, os.O_RDONLY)
            try:
                return os.fstat(descriptor).st_mtime
            finally:
                os.close(descriptor)
        return 0.0


def _read(path: Path) -> dict[str, object]:
    with suppress(OSError, ValueError):
        values = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(values, dict):
            return values
    return {}


def _boot_id() -> str | None:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() or None
    return None


def _start_time(pid: int) -> int | None:
    """Clock ticks from the boot to the start of a process; None if there is none (proc(5), /proc/PID/stat)."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    return None

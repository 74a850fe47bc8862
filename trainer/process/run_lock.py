"""Lock of a run directory with fencing tokens, held by rank 0 of the attempt that trains. Torch-free.

Each taking of the lock makes a file with the next number, its fencing token, by link(2), which is atomic on network
file systems too, unlike flock(2). No file is ever deleted, so no number is used twice. The newest file is the holder's,
who renews its modification time; an empty file is a lock that was given back. In the holder's own PID namespace the
process table tells if it lives; from elsewhere only a time that still changes, by the watcher's own monotonic clock.

A holder that stood still for too long loses the lock without notice. So it calls ``check`` before each write:

* A save is staged, checked and renamed (trainer.checkpoint.directory.publish). The next holder deletes what is staged
  before it reads any checkpoint. So a save is published before that holder looks, or never, even if the loser stands
  still between the check and the rename.
* A row of metrics.jsonl that is written after such a pause has the lower token; readers drop it.

What remains, if the loser stands still between a check and the write: it may delete one checkpoint beyond keep_last, or
the Hugging Face folder beside one, which can be exported again. A process without a run directory has no lock.
"""

from __future__ import annotations

import json
import os
import re
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
"""Time without a renewal after which a holder elsewhere counts as dead. File servers fail over in less."""
ENDING_S = 5.0
"""Time that a living holder on this host gets to end: a rank without a launcher ends within a second."""
_LONGEST_LOOK_S = 1.0
"""Most that one look counts towards STALE_S: in a longer one this process or the file server stood still."""
_NAME = re.compile(r"(\d+)\.json")


class LockedRunError(RuntimeError):
    """Another process trains in the run directory. The message names its process and host."""


class LostLockError(LockedRunError):
    """Another process has taken the lock since. The message names its process and host."""


class RunLock:
    """The lock of one run directory. A context manager; ``acquire`` first.

    Attributes:
        token: fencing token, greater with each taking of the lock; 0 before ``acquire``.
        is_known_lost: True once a check has found that another process took the lock. Costs nothing to read.
    """

    def __init__(
        self, folder: Path, *, stale_s: float = STALE_S, ending_s: float = ENDING_S, renew_s: float = RENEW_S
    ) -> None:
        """Lock by files in ``folder``."""
        self.token = 0
        self.is_known_lost = False
        self._folder = folder
        self._stale_s = stale_s
        self._ending_s = ending_s
        self._renew_s = renew_s
        self._nonce = uuid.uuid4().hex
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="run lock", daemon=True)

    def acquire(self) -> None:
        """Take the lock, also from a dead holder.

        Raises:
            LockedRunError: the holder lives.
            OSError: the folder cannot be read or written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        token = self._newest()
        while True:
            if token > 0:
                self._wait_for_end(token)
            token += 1
            if self._make(token):
                break
        self.token = token
        self._thread.start()

    def check(self) -> None:
        """Make sure that this process still holds the lock; lists one small folder.

        Raises:
            LostLockError: another process has taken it.
            OSError: the folder cannot be read, so the answer is unknown.
        """
        newest = self._newest()
        if newest == self.token:
            return
        self.is_known_lost = True
        raise LostLockError(f"{self._folder.parent}: {self._taker(newest)}; this process writes nothing more")

    def is_lost(self) -> bool:
        """True if a check finds that another process has taken the lock."""
        try:
            self.check()
        except LostLockError:
            return True
        except OSError:
            return False
        return False

    def release(self) -> None:
        """Give the lock back."""
        self._end.set()
        if self.token > 0:
            self._thread.join(timeout=self._renew_s)
            # An empty file needs no room on a full disk. The number stays used.
            with suppress(OSError):
                os.truncate(self._file(self.token), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _file(self, token: int) -> Path:
        return self._folder / f"{token}.json"

    def _newest(self) -> int:
        # Listing opens the folder, so a network file system asks its server (nfs(5), close-to-open consistency).
        matches = map(_NAME.fullmatch, os.listdir(self._folder))  # noqa: PTH208
        return max((int(match[1]) for match in matches if match), default=0)

    def _make(self, token: int) -> bool:
        """Make the file of ``token``, complete from the first moment on; False if another process has made it."""
        aside = self._folder / f".{self._nonce}"
        pid = os.getpid()
        values = {"host": socket.gethostname(), "pid": pid, "start": _start_time(pid), "nonce": self._nonce}
        values |= {"boot_id": _boot_id(), "pid_namespace": _pid_namespace()}
        aside.write_text(json.dumps(values), encoding="utf-8")
        try:
            os.link(aside, self._file(token))
        except FileExistsError:
            # A network file system that repeats a request refuses what the first one has made.
            return (_read(self._file(token)) or {}).get("nonce") == self._nonce
        finally:
            aside.unlink()
        return True

    def _wait_for_end(self, token: int) -> None:
        """Return once the holder of ``token`` has given the lock back, is dead, or has lost the lock.

        Raises:
            LockedRunError: the holder lives.
        """
        path = self._file(token)
        holder, first = _read(path), _renewed(path)
        began = last = time.monotonic()
        quiet_s = 0.0
        while holder is not None and self._newest() == token:
            has_renewed = _renewed(path) != first
            now = time.monotonic()
            quiet_s += min(now - last, _LONGEST_LOOK_S)
            last = now
            if _is_here(holder):
                if _start_time(int(str(holder["pid"]))) != holder.get("start"):
                    return
                lives = now - began > self._ending_s
            elif quiet_s > self._stale_s and not has_renewed:
                return
            else:
                lives = has_renewed
            holder = _read(path)
            if lives and holder is not None:
                raise LockedRunError(
                    f"{self._folder.parent}: process {holder.get('pid')} on {holder.get('host')} still trains in this "
                    "run directory; end it, or wait for its end, and start again"
                )
            time.sleep(min(0.2, self._ending_s / 5))

    def _taker(self, newest: int) -> str:
        """The process that took the lock from this one, in words."""
        if newest < self.token:
            return f"its lock file {self._file(self.token)} is gone, so another process may train here"
        with suppress(OSError):
            holder = _read(self._file(newest))
            if holder:
                return f"process {holder.get('pid')} on {holder.get('host')} has taken this run over"
        return "another process, which has ended since, has taken this run over"

    def _renew(self) -> None:
        stamp = 0
        while not self._end.wait(self._renew_s) and not self.is_known_lost:
            # The time always grows, also if the clock is set back. No content is written: a full disk must not cost
            # the lock.
            stamp = max(time.time_ns(), stamp + 1_000_000_000)
            with suppress(OSError, LostLockError):
                self.check()
                os.utime(self._file(self.token), ns=(stamp, stamp))


def _read(path: Path) -> dict[str, object] | None:
    """The holder in a lock file; None if the lock was given back.

    Empty if the file is damaged: then only its time tells if the holder lives.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.strip("\0"):
        return None
    with suppress(ValueError):
        values = json.loads(text)
        if isinstance(values, dict):
            return values
    return {}


def _renewed(path: Path) -> int:
    # Opening makes a network file system ask its server (nfs(5), close-to-open consistency).
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def _is_here(holder: dict[str, object]) -> bool:
    """True if the process table of this process shows the holder: the same boot and the same PID namespace."""
    here = (_boot_id(), _pid_namespace())
    return None not in here and (holder.get("boot_id"), holder.get("pid_namespace")) == here


def _boot_id() -> str | None:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() or None
    return None


def _pid_namespace() -> int | None:
    """Identity of this process's PID namespace (namespaces(7)), which a container has of its own."""
    with suppress(OSError):
        return Path("/proc/self/ns/pid").stat().st_ino
    return None


def _start_time(pid: int) -> int | None:
    """Clock ticks from the boot to the start of a process; None if there is none (proc(5), /proc/PID/stat)."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    return None

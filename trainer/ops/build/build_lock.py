"""File locks for one builder at a time and for files in use. Torch-free.

The operating system releases a lock when its process ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.ops.build.build_settings import BuildError

_POLL_INTERVAL_S = 0.2
_REPORT_AFTER_S = 1.0
"""A longer wait is reported."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class NoLocksError(Exception):
    """The file system has no locks, as Lustre without ``flock``, or NFS without lockd."""


@contextmanager
def hold_lock(path: Path, deadline: float, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock on the lock file ``path``, which is kept afterwards.

    Args:
        path: the lock file; its folder must exist.
        deadline: deadline of the wait by time.monotonic().
        say: receives one line that names the holder of the lock.

    Raises:
        NoLocksError: the file system has no locks.
        OSError: the file cannot be written.
        BuildError: the deadline has passed.
    """
    descriptor = _opened(path, deadline, say)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{socket.gethostname()}, process {os.getpid()}".encode(), 0)
        yield
    finally:
        # The next holder overwrites the name.
        os.close(descriptor)


@contextmanager
def hold_if_free(path: Path) -> Iterator[bool]:
    """Hold the lock on an existing file if free. Yields True with the lock.

    Raises:
        NoLocksError: the file system has no locks.
        OSError: the file is missing or cannot be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield _try(descriptor)
    finally:
        os.close(descriptor)


def mark_in_use(path: Path) -> int:
    """Open a file with a shared lock that prevents its removal until closed.

    Returns:
        The descriptor; without a lock on file systems without locks.

    Raises:
        OSError: the file is missing or is being removed.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    is_free = True
    # Without a lock the file can still be used: files are removed only after long disuse.
    with suppress(NoLocksError, OSError):
        is_free = _try(descriptor, fcntl.LOCK_SH)
    if is_free and _is_at(descriptor, path):
        return descriptor
    os.close(descriptor)
    raise FileNotFoundError(errno.ENOENT, "it was removed just now", str(path))


def _opened(path: Path, deadline: float, say: Callable[[str], None]) -> int:
    """Open ``path`` and take the lock, again if the file was removed meanwhile."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _take(descriptor, path, deadline, say)
            if _is_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _take(descriptor: int, path: Path, deadline: float, say: Callable[[str], None]) -> None:
    began, is_reported = time.monotonic(), False
    while not _try(descriptor):
        now = time.monotonic()
        if now > deadline:
            raise BuildError(f"another process ({_holder(descriptor)}) is still building and holds the lock {path}")
        if not is_reported and now - began > _REPORT_AFTER_S:
            say(f"kernels: waiting for another process ({_holder(descriptor)}) to build them")
            is_reported = True
        time.sleep(_POLL_INTERVAL_S)


def _try(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise NoLocksError from None
        raise
    return True


def _holder(descriptor: int) -> str:
    with suppress(OSError):
        return os.pread(descriptor, 256, 0).decode(errors="replace") or "unknown"
    return "unknown"

"""One builder at a time, and nobody removes what is in use: locks of the operating system. Torch-free.

They end with the process that holds them.
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

_LOOK_EVERY_S = 0.2
_TOO_LONG_S = 1.0
"""Waiting that long is worth a line."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class NoLocksError(Exception):
    """The file system has no locks: NFS without its lock service, Lustre mounted without ``flock``."""


@contextmanager
def hold_lock(path: Path, deadline: float, say: Callable[[str], None]) -> Iterator[None]:
    """Be the only one on this file system to hold the lock file ``path``, which is left there.

    Args:
        path: of the file; its folder must be there.
        deadline: by time.monotonic(); who has not got the lock by then gives up.
        say: is told, once, whom this process waits for.

    Raises:
        NoLocksError: the file system has none.
        OSError: the file cannot be written.
        BuildError: the deadline has passed.
    """
    descriptor = _opened(path, deadline, say)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{socket.gethostname()}, process {os.getpid()}".encode(), 0)
        yield
    finally:
        # Letting go is all there is to it: the next holder writes its own name.
        os.close(descriptor)


@contextmanager
def hold_if_free(path: Path) -> Iterator[bool]:
    """Hold the lock on a file that is there, if nobody else does; whether that is so.

    Raises:
        NoLocksError: the file system has none.
        OSError: the file is not there, or cannot be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield _try(descriptor)
    finally:
        os.close(descriptor)


def mark_in_use(path: Path) -> int:
    """A descriptor of a file, which until it is closed keeps others from removing it, where there are locks.

    Raises:
        OSError: it is not there, or is being removed.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    is_free = True
    # Without a lock it can be used all the same, and is removed after long disuse only.
    with suppress(NoLocksError, OSError):
        is_free = _try(descriptor, fcntl.LOCK_SH)
    if is_free and _is_at(descriptor, path):
        return descriptor
    os.close(descriptor)
    raise FileNotFoundError(errno.ENOENT, "it was removed just now", str(path))


def _opened(path: Path, deadline: float, say: Callable[[str], None]) -> int:
    """A descriptor that holds the lock on what is at ``path``, and not on what was there before."""
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
    began, told = time.monotonic(), False
    while not _try(descriptor):
        now = time.monotonic()
        if now > deadline:
            raise BuildError(f"another process ({_holder(descriptor)}) is still building; it holds {path}")
        if not told and now - began > _TOO_LONG_S:
            say(f"kernels: waiting for another process ({_holder(descriptor)}) that is building them")
            told = True
        time.sleep(_LOOK_EVERY_S)


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

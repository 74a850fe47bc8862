"""Cache of built files: the first process builds, all others wait. Torch-free.

A file appears by a rename and is never partial. It ends in a seal over its name and contents: a truncated, altered or
renamed file counts as missing. Loaders of libraries and of device code ignore bytes after the end that the file's
header states. The code runs with the rights of the user who loads it. Therefore files that belong to other users than
this user and root, or that others may write, also count as missing.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.ops.build.build_lock import NoLocksError, hold_if_free, hold_lock
from trainer.ops.build.build_settings import BuildError

LIMIT_S = 900.0
"""Limit of a build, including the wait for another builder."""
_SEAL = b"llmctl sealed "
_WRITE_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_DISUSED_S = 30 * 24 * 3600.0
"""Files unused for this time may be removed, except the newest few."""
_ALWAYS_KEPT = 3
_MARK_EVERY_S = 24 * 3600.0
"""Resolution of the recorded time of last use."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ROOM_BYTES = 1 << 26
"""More than the space of a build. Less free space may explain a failed build."""
# Errors that another folder may avoid: a home directory that is read-only, full, over its quota, broken or missing, or
# a path of another file type than expected.
_UNUSABLE = (
    *(*_FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR),
    *(errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.EIO, errno.ESTALE),
)

_NOT_OURS = "belongs to another user or is writable by others"

Make = Callable[[Path, float], None]
"""Writes the given file by a deadline of time.monotonic().

The file's folder is private to the call. Raises BuildError, or OSError for a problem of the folder."""


@dataclass(frozen=True)
class BuildCache:
    """Folders of built files.

    Attributes:
        shared: the user's folder, usually on a file system of many nodes.
        of_node: folder of this node, used if ``shared`` is read-only, has no locks, or is mounted noexec.
    """

    shared: Path
    of_node: Path

    @classmethod
    def below(cls, cache: Path) -> BuildCache:
        """The cache of kernels in the user's cache folder."""
        try:
            temporary = Path(tempfile.gettempdir())
        except FileNotFoundError:
            # No temporary folder is writable, but existing files can still be read.
            temporary = Path("/tmp")
        return cls(cache / "kernels", temporary / f"llmctl-{os.getuid()}" / "kernels")

    def find(self, name: str) -> Path | None:
        """Find the intact file of this name, and mark it as used."""
        return next(self.find_all(name), None)

    def find_any(self, pattern: str) -> Path | None:
        """Find the most recently used intact file that matches ``pattern`` of Path.glob."""
        return next(self.find_all(pattern), None)

    def find_all(self, pattern: str) -> Iterator[Path]:
        """Yield the intact files that match ``pattern``, and mark each as used.

        Files in ``shared`` come first; within a folder the most recently used file comes first.
        """
        for folder in (self.shared, *([self.of_node] if self._is_private(self.of_node) else [])):
            for path in sorted(folder.glob(pattern), key=_age, reverse=True) if _lets_code_run(folder) else ():
                if is_intact(path):
                    _mark_used(path)
                    yield path

    def distrusted(self, pattern: str) -> str | None:
        """Sentence on an existing file that is not trusted, or None."""
        found = (distrust(path) for path in sorted(self.shared.glob(pattern)))
        return next((reason for reason in found if reason is not None), None)

    def remove_disused(self, pattern: str) -> None:
        """Remove disused files that match ``pattern``, and leftovers of killed builders.

        Keeps the newest few files, recently used files, and files in use on this node or, if locks work across nodes,
        on another node. Ignores files that cannot be removed.
        """
        for folder in (self.shared, self.of_node):
            for path in sorted(folder.glob(pattern), key=_age, reverse=True)[_ALWAYS_KEPT:]:
                if _is_disused(path):
                    _remove(path)
            for left in folder.glob(f"{Path(pattern).parent}/.build-*"):
                if _is_disused(left):
                    shutil.rmtree(left, ignore_errors=True)

    def obtain(
        self,
        name: str,
        make: Make,
        say: Callable[[str], None],
        *,
        limit_s: float = LIMIT_S,
        instead_of: Path | None = None,
    ) -> Path:
        """The file of this name, built by ``make`` if missing.

        Args:
            name: path below the cache folder.
            make: function that builds the file.
            say: receives a line for each wait or change of folder.
            limit_s: limit of waiting and building together, in seconds.
            instead_of: an existing file that is unusable, unless another process has replaced it meanwhile.

        Raises:
            BuildError: ``make`` failed, the limit has passed, or no folder can hold the file.
        """
        refused = _identity(instead_of) if instead_of is not None else None
        deadline = time.monotonic() + limit_s

        def built() -> Path | None:
            found = self.find(name)
            return found if found is not None and _identity(found) != refused else None

        problems: list[str] = []
        for folder in (self.shared, self.of_node):
            # Another process may have built it in the meantime, also in the folder that this one cannot use.
            found = built()
            if found is not None:
                return found
            if problems:
                say(f"kernels: {problems[-1]}; builds are kept in {folder}")
            path = folder / name
            try:
                self._prepare(folder, path.parent)
                if not _lets_code_run(folder):
                    problems.append(f"{folder} is on a file system that is mounted noexec")
                    continue
                reason = distrust(path)
                if reason is not None:
                    say(f"kernels: {reason}; the file is ignored and replaced")
                with hold_lock(path.with_suffix(".lock"), deadline, say):
                    return built() or _build(path, make, deadline)
            except NoLocksError:
                problems.append(f"{folder} is on a file system without locks")
            except OSError as error:
                if error.errno not in _UNUSABLE:
                    raise BuildError(f"{error.filename or folder}: {error.strerror}") from error
                problems.append(f"{error.filename or folder}: {error.strerror}")
        raise BuildError(
            f"no folder can hold the build: {'; '.join(problems)}; set LLMCTL_CACHE_DIR to a writable folder"
        )

    def _prepare(self, folder: Path, parent: Path) -> None:
        if folder != self.shared:
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            if not self._is_private(folder):
                raise PermissionError(errno.EPERM, _NOT_OURS, str(folder.parent))
        for place in (folder, parent):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = place.stat()
            if facts.st_uid == os.getuid() and facts.st_mode & _WRITE_OF_OTHERS:
                # Made by another program, or on a file system that ignores the umask.
                place.chmod(stat.S_IMODE(facts.st_mode) & ~_WRITE_OF_OTHERS)
            if not _is_trusted(place):
                raise PermissionError(errno.EPERM, _NOT_OURS, str(place))

    @staticmethod
    def _is_private(folder: Path) -> bool:
        # Any user can make a folder of this name in the temporary folder, and its code would run as this user.
        try:
            facts = os.lstat(folder.parent)
        except OSError:
            return False
        return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o077


def _build(path: Path, make: Make, deadline: float) -> Path:
    """Build the file. The caller holds the lock."""
    of_this_file = f".build-{path.name}-"
    of_this_node = f"{of_this_file}{socket.gethostname()}-"
    for left in path.parent.glob(f"{of_this_file}*"):
        # Leftover of a killed builder. If locks hold for one node only, a builder of another node may still use it.
        if left.name.startswith(of_this_node) or time.time() - _age(left) > LIMIT_S:
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=of_this_node))
    try:
        made = folder / path.name
        try:
            make(made, deadline)
        except BuildError:
            _check_room(folder)
            raise
        seal(made, path)
        made.chmod(stat.S_IMODE(made.stat().st_mode) & ~_WRITE_OF_OTHERS)
        made.rename(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return path


def _check_room(folder: Path) -> None:
    """Raise OSError if the disk or a quota is full.

    Each compiler reports a full disk in different words.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, _ROOM_BYTES)
        except OSError as error:
            # Some file systems do not support posix_fallocate.
            if error.errno in _FULL:
                raise


def _lets_code_run(folder: Path) -> bool:
    """True unless a folder is mounted noexec, as some home directories are."""
    try:
        return not os.statvfs(folder).f_flag & os.ST_NOEXEC
    except OSError:
        return True


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _is_disused(path: Path) -> bool:
    return time.time() - _age(path) > _DISUSED_S


def _mark_used(path: Path) -> None:
    if time.time() - _age(path) > _MARK_EVERY_S:
        with suppress(OSError):
            os.utime(path)


def _remove(path: Path) -> None:
    """Remove a file unless a process holds a lock of build_lock on it."""
    lock = path.with_suffix(".lock")
    with suppress(OSError, NoLocksError), hold_if_free(lock) as is_unbuilt, hold_if_free(path) as is_unused:
        if is_unbuilt and is_unused and _is_disused(path):
            path.unlink()
            lock.unlink()
            path.parent.rmdir()


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file, which marking as used does not change."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def _is_trusted(path: Path) -> bool:
    """True if only this user and root can write. Raises OSError if missing."""
    facts = path.stat()
    return facts.st_uid in (os.getuid(), 0) and not facts.st_mode & _WRITE_OF_OTHERS


def distrust(path: Path) -> str | None:
    """Reason why an existing file of a cache must not be used, or None."""
    try:
        # The cache, the folder of the build, and the file.
        ours = [(place, _is_trusted(place)) for place in (path.parents[1], path.parent, path)]
    except OSError:
        return None
    return next((f"{place} {_NOT_OURS}" for place, is_trusted in ours if not is_trusted), None)


def seal(made: Path, path: Path) -> None:
    """Seal the built file ``made`` for the path ``path``."""
    content = made.read_bytes()
    with made.open("ab") as file:
        file.write(_seal_of(path, content))
        file.flush()
        os.fsync(file.fileno())


def _seal_of(path: Path, content: bytes) -> bytes:
    name = f"{path.parent.name}/{path.name}\0"
    return _SEAL + hashlib.sha256(name.encode() + content).hexdigest().encode()


def read_sealed(path: Path) -> bytes | None:
    """Contents of a file without the seal; None if missing, damaged or untrusted."""
    try:
        content = path.read_bytes() if distrust(path) is None else b""
    except OSError:
        return None
    length = len(_seal_of(path, b""))
    built, seal = content[:-length], content[-length:]
    return built if seal == _seal_of(path, built) else None


def is_intact(path: Path) -> bool:
    """True if a built file exists and is intact."""
    return read_sealed(path) is not None

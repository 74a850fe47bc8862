"""Files that are built once and kept: whoever asks first builds, everybody else waits or finds them. Torch-free.

A file appears by a rename, whole or not at all, and ends in a seal over its name and contents, so that one that was
truncated, altered or put under another name counts as not there. Loaders of libraries and of device code do not look
beyond the end that a file's own header states. Its code runs as whoever loads it: what is neither this user's own nor
root's, or what others may write to, counts as not there either.
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
"""How long a build may take, with the wait for another's."""
_SEAL = b"llmctl sealed "
_WRITE_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_DISUSED_S = 30 * 24 * 3600.0
"""Since a file was last used: then it may be removed, if it is not among the last few of its kind."""
_ALWAYS_KEPT = 3
_MARK_EVERY_S = 24 * 3600.0
"""How exactly it is known when a file was last used."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ROOM_BYTES = 1 << 26
"""More than a build and what it leaves take: where there is less, a failure may be for want of it."""
# What another folder may help against: a home directory that is read-only, full, over its quota, broken or not there,
# or something else in the place of a folder or of a file.
_UNUSABLE = (
    *(*_FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR),
    *(errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.EIO, errno.ESTALE),
)

_NOT_OURS = "belongs to another user, or others may write to it"

Make = Callable[[Path, float], None]
"""Writes the file it is given, by a deadline of time.monotonic(); the file's folder is all its own. Raises BuildError,
or OSError where the folder is at fault."""


@dataclass(frozen=True)
class BuildCache:
    """Where built files are kept.

    Attributes:
        shared: the user's folder, as a rule on a file system of many nodes.
        of_node: this node's, in the place of the former where that is read-only, has no locks, or lets no code run.
    """

    shared: Path
    of_node: Path

    @classmethod
    def below(cls, cache: Path) -> BuildCache:
        """The cache of kernels in the user's folder of caches."""
        try:
            temporary = Path(tempfile.gettempdir())
        except FileNotFoundError:
            # None can be written: what is there is read all the same.
            temporary = Path("/tmp")
        return cls(cache / "kernels", temporary / f"llmctl-{os.getuid()}" / "kernels")

    def find(self, name: str) -> Path | None:
        """The file of this name, if it was built and is intact. It counts as used now."""
        return next(self.find_all(name), None)

    def find_any(self, pattern: str) -> Path | None:
        """The one used last of the intact files whose names match ``pattern``, as Path.glob takes it."""
        return next(self.find_all(pattern), None)

    def find_all(self, pattern: str) -> Iterator[Path]:
        """The intact files whose names match ``pattern``: those of many nodes first, and of these the one used last.

        Each counts as used now.
        """
        for folder in (self.shared, *([self.of_node] if self._is_native(self.of_node) else [])):
            for path in sorted(folder.glob(pattern), key=_age, reverse=True) if _lets_code_run(folder) else ():
                if is_intact(path):
                    _mark_used(path)
                    yield path

    def distrusted(self, pattern: str) -> str | None:
        """Why a file that is there is not used, in a sentence; None: there is none of that kind."""
        found = (distrust(path) for path in sorted(self.shared.glob(pattern)))
        return next((reason for reason in found if reason is not None), None)

    def remove_disused(self, pattern: str) -> None:
        """Remove files whose names match ``pattern``, and what killed builders left beside them.

        The last few are kept, what was used of late, and what a process is using on this node or, where locks reach as
        far, on another one. What cannot be removed stays.
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
        """The file of this name, built by ``make`` if it is not there.

        Args:
            name: below the folder; a path.
            make: builds it.
            say: is told, in a line, what this process waits for.
            limit_s: for waiting and building together.
            instead_of: a file that is there and of no use; another process may have replaced it meanwhile.

        Raises:
            BuildError: ``make`` failed, the time is over, or no folder can hold the file.
        """
        refused = _identity(instead_of) if instead_of is not None else None
        deadline = time.monotonic() + limit_s

        def built() -> Path | None:
            found = self.find(name)
            return found if found is not None and _identity(found) != refused else None

        problems: list[str] = []
        for folder in (self.shared, self.of_node):
            found = built()
            if found is not None:
                return found
            if problems:
                say(f"kernels: {problems[-1]}; what is built is kept in {folder}")
            path = folder / name
            try:
                self._prepare(folder, path.parent)
                if not _lets_code_run(folder):
                    problems.append(f"{folder} is on a file system that no code may run from (noexec)")
                    continue
                reason = distrust(path)
                if reason is not None:
                    say(f"kernels: {reason}; it is not used, and replaced")
                with hold_lock(path.with_suffix(".lock"), deadline, say):
                    return built() or _build(path, make, deadline)
            except NoLocksError:
                problems.append(f"{folder} is on a file system without locks")
            except OSError as error:
                if error.errno not in _UNUSABLE:
                    raise BuildError(f"{error.filename or folder}: {error.strerror}") from error
                problems.append(f"{error.filename or folder}: {error.strerror}")
        raise BuildError(f"no folder can hold what is built: {'; '.join(problems)}; name one by LLMCTL_CACHE_DIR")

    def _prepare(self, folder: Path, parent: Path) -> None:
        if folder != self.shared:
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            if not self._is_native(folder):
                raise PermissionError(errno.EPERM, _NOT_OURS, str(folder.parent))
        for place in (folder, parent):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = place.stat()
            if facts.st_uid == os.getuid() and facts.st_mode & _WRITE_OF_OTHERS:
                # Made in another way, or where the umask was of no account.
                place.chmod(stat.S_IMODE(facts.st_mode) & ~_WRITE_OF_OTHERS)
            if not _is_trusted(place):
                raise PermissionError(errno.EPERM, _NOT_OURS, str(place))

    @staticmethod
    def _is_native(folder: Path) -> bool:
        # Anybody may make a folder of any name where temporary files are; its code would run as us.
        try:
            facts = os.lstat(folder.parent)
        except OSError:
            return False
        return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o077


def _build(path: Path, make: Make, deadline: float) -> Path:
    """Build while the lock is held."""
    of_this_file = f".build-{path.name}-"
    of_this_node = f"{of_this_file}{socket.gethostname()}-"
    for left in path.parent.glob(f"{of_this_file}*"):
        # What a killed builder left. Where locks hold for one node only, another node's may be at it still.
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
    """Raise OSError where the disk is full, or a quota: compilers say so in words of their own."""
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, _ROOM_BYTES)
        except OSError as error:
            # Not where a file system cannot tell.
            if error.errno in _FULL:
                raise


def _lets_code_run(folder: Path) -> bool:
    """Whether the loader takes libraries from there: what is mounted noexec, as some home directories are, has none."""
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
    """Unless somebody builds or uses it: whoever does holds a lock of build_lock."""
    lock = path.with_suffix(".lock")
    with suppress(OSError, NoLocksError), hold_if_free(lock) as is_unbuilt, hold_if_free(path) as is_unused:
        if is_unbuilt and is_unused and _is_disused(path):
            path.unlink()
            lock.unlink()
            path.parent.rmdir()


def _identity(path: Path) -> tuple[int, int] | None:
    """Of a file, not of its name; a mark of its use leaves it the same."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def _is_trusted(path: Path) -> bool:
    """Whether nobody but this user and root can have put it there. Raises OSError if it is not there."""
    facts = path.stat()
    return facts.st_uid in (os.getuid(), 0) and not facts.st_mode & _WRITE_OF_OTHERS


def distrust(path: Path) -> str | None:
    """Why a file of a cache must not be used though it is there, in a few words; None: it may, or is not there."""
    try:
        # The cache, the folder of the build, and the file.
        ours = [(place, _is_trusted(place)) for place in (path.parents[1], path.parent, path)]
    except OSError:
        return None
    return next((f"{place} {_NOT_OURS}" for place, is_trusted in ours if not is_trusted), None)


def seal(made: Path, path: Path) -> None:
    """Seal what was made to become ``path``."""
    content = made.read_bytes()
    with made.open("ab") as file:
        file.write(_seal_of(path, content))
        file.flush()
        os.fsync(file.fileno())


def _seal_of(path: Path, content: bytes) -> bytes:
    name = f"{path.parent.name}/{path.name}\0"
    return _SEAL + hashlib.sha256(name.encode() + content).hexdigest().encode()


def read_sealed(path: Path) -> bytes | None:
    """What was built, without its seal; None if the file is not there, not intact, or not to be trusted."""
    try:
        content = path.read_bytes() if distrust(path) is None else b""
    except OSError:
        return None
    length = len(_seal_of(path, b""))
    built, seal = content[:-length], content[-length:]
    return built if seal == _seal_of(path, built) else None


def is_intact(path: Path) -> bool:
    """Whether a built file is there and whole."""
    return read_sealed(path) is not None

"""Changing files: what submitting asks of a transport. Standard library only, Python 3.7.

The hands of the local transport; like file_reads, these functions are also run on the other side of a connection.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileWrite:
    """One file to be written whole: where, its bytes and its mode."""

    path: str
    data: bytes
    mode: int = 0o600


@dataclass(frozen=True)
class PathFacts:
    """What stands at a path.

    Attributes:
        kind: ``file``, ``folder``, ``other``, or empty if nothing is there.
        nearest: the path itself, or the first of its parents that is there.
        nearest_kind: kind of ``nearest``.
        can_write: whether we may make or change things in ``nearest``.
        is_read_only: whether its file system is mounted read-only.
        free_bytes: space left for us on its file system.
    """

    kind: str
    nearest: str
    nearest_kind: str
    can_write: bool
    is_read_only: bool
    free_bytes: int


def write_files(files: Sequence[FileWrite]) -> None:
    """Write each file all or nothing, readable by its owner alone until it has its mode.

    Raises:
        OSError: one cannot be written; nothing of it is left behind.
    """
    for file in files:
        _write(file)


def make_folder(path: str, *, mode: int = 0o777, exclusive: bool = False) -> None:
    """Make a folder and its parents; the parents by the umask.

    Raises:
        FileExistsError: ``exclusive``, and it is there.
        OSError: it cannot be made.
    """
    folder = Path(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=mode, exist_ok=not exclusive)


def remove(paths: Sequence[str]) -> None:
    """Remove files, links and whole folders; what is absent or cannot be removed is passed over."""
    for path in map(Path, paths):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def link(links: Mapping[str, str]) -> None:
    """Make symbolic links, path -> target; one that is there is replaced."""
    for path, target in links.items():
        with suppress(FileNotFoundError):
            Path(path).unlink()
        Path(path).symlink_to(target)


def look_at(paths: Sequence[str]) -> list[PathFacts]:
    """What stands at each path."""
    return [_look_at(Path(path)) for path in paths]


def home() -> str:
    """The user's home directory."""
    return str(Path.home())


def take_lock(path: str) -> int:
    """Hold a lock file until ``release_lock``, or until this process ends, however it does (flock(2)).

    Raises:
        BlockingIOError: somebody else holds it.
        OSError: it cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def release_lock(lock: int) -> None:
    """Let go of what ``take_lock`` gave."""
    os.close(lock)


@contextmanager
def new_folder(folder: str) -> Iterator[str | None]:
    """A folder to fill, next to ``folder``, which it becomes at the end; None if ``folder`` is there already.

    Raises:
        OSError: it cannot be made. Whatever goes wrong, nothing of it is left behind.
    """
    target = Path(folder)
    if target.is_dir():
        yield None
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.urandom(6).hex()}")
    aside.mkdir()
    try:
        yield str(aside)
        try:
            aside.rename(target)
        except OSError:
            if not target.is_dir():  # else somebody was faster, with the same content
                raise
    finally:
        shutil.rmtree(str(aside), ignore_errors=True)


def unpack(archive: str, folder: str) -> None:
    """Make ``folder`` of a tar archive of plain files, all or nothing, and remove the archive.

    A folder that is there already stays as it is.

    Raises:
        OSError: it cannot be read or written; nothing is left behind.
    """
    try:
        with new_folder(folder) as aside:
            if aside is not None:
                _extract(archive, Path(aside))
    finally:
        remove([archive])


def _extract(archive: str, folder: Path) -> None:
    import tarfile  # as slow to import as half of llmctl --help, and only receivers need it

    with tarfile.open(archive) as opened:
        for member in opened:
            place = folder / member.name
            place.parent.mkdir(parents=True, exist_ok=True)
            content = opened.extractfile(member)
            if content is None:
                raise OSError(errno.EINVAL, "is no plain file", member.name)
            with content, place.open("wb") as file:
                shutil.copyfileobj(content, file)
            place.chmod(member.mode & 0o777)


def _write(file: FileWrite) -> None:
    path = Path(file.path)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            os.fchmod(descriptor, file.mode)
            opened.write(file.data)
            opened.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise


def _look_at(path: Path) -> PathFacts:
    nearest = next(place for place in (path, *path.parents) if place.exists() or place.is_symlink())
    kind = _kind(nearest)
    space = None
    with suppress(OSError):  # a link to nothing
        space = os.statvfs(nearest)
    return PathFacts(
        kind=kind if nearest == path else "",
        nearest=str(nearest),
        nearest_kind=kind,
        can_write=os.access(nearest, os.W_OK | os.X_OK) if kind == "folder" else os.access(nearest, os.W_OK),
        is_read_only=space is not None and bool(space.f_flag & os.ST_RDONLY),
        free_bytes=space.f_bavail * space.f_frsize if space is not None else 0,
    )


def _kind(path: Path) -> str:
    try:
        return "folder" if path.is_dir() else "file" if path.is_file() else "other"
    except OSError:
        return "other"

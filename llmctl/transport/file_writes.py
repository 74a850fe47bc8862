"""Change files, as submitting needs. Standard library only, Python 3.7.

The local transport calls these functions directly. Like file_reads, they also run at the far end of a connection.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from llmctl.supervisor import trust


@dataclass(frozen=True)
class FileWrite:
    """One file to write whole: path, bytes and mode."""

    path: str
    data: bytes
    mode: int = 0o600


@dataclass(frozen=True)
class PathFacts:
    """Facts about a path.

    Attributes:
        kind: ``file``, ``folder``, ``other``, or empty if the path does not exist.
        nearest: the path itself, or its nearest parent that exists.
        nearest_kind: kind of ``nearest``.
        can_write: True if the user may write ``nearest``, or create files in a folder ``nearest``.
        is_read_only: True if the file system of ``nearest`` is mounted read-only.
        free_bytes: space left for the user on that file system.
    """

    kind: str
    nearest: str
    nearest_kind: str
    can_write: bool
    is_read_only: bool
    free_bytes: int

    def why_unwritable(self, folder: str) -> str:
        """The obstacle to writing ``folder``, whose facts these are, and its missing parents; empty without one."""
        if self.nearest_kind != "folder":
            return f"{self.nearest} is not a folder"
        if not self.can_write:
            return f"you cannot write to {self.nearest}"
        if self.is_read_only:
            return f"{self.nearest} is on a file system mounted read-only"
        if self.nearest != folder and self.nearest.startswith(("/proc", "/sys")):
            return f"{self.nearest} belongs to the kernel and cannot hold your files"
        return ""


def write_files(files: Sequence[FileWrite]) -> None:
    """Write each file atomically; only its owner can read the file until its mode is set.

    Raises:
        OSError: a file cannot be written; no part of that file is left behind.
    """
    for file in files:
        _write(file)


def make_folder(path: str, *, mode: int = 0o777, exclusive: bool = False) -> None:
    """Make a folder and its parents, all of this mode less the umask.

    Raises:
        FileExistsError: ``exclusive`` is set and the path exists.
        OSError: the folder cannot be made.
    """
    folder = Path(path)
    make_parents(str(folder.parent), mode)
    folder.mkdir(mode=mode, exist_ok=not exclusive)


def make_own_folder(runs_root: str, name: str | None = None) -> tuple[str, str]:
    """Make the folder of this user alone beside the runs, mode 0700, unless it exists and is one.

    A job runs the code in it. If others may write to ``runs_root``, which belongs to this user, the folder gets the
    sticky bit: without the bit, others could rename what is in it. Secrets of runs that are gone are removed.

    Args:
        runs_root: folder of the runs; made if missing.
        name: of the folder; None: a name of this machine's user.

    Returns:
        The folder's name, and a sentence if the sticky bit was missing; else empty.

    Raises:
        OSError: the folder cannot be made; or it is a link, belongs to another user, or others may write to it; or
            others can rename what is in ``runs_root``, which belongs to another user.
    """
    root = Path(runs_root)
    is_new = not root.is_dir()
    root.mkdir(parents=True, exist_ok=True)
    mode = root.stat().st_mode
    is_open = mode & trust.OTHERS_WRITE and not mode & stat.S_ISVTX
    note = _close_root(root) if is_open else ""
    folder = root / (name or f".llmctl-{os.geteuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    try:
        trust.check_folder(str(folder))
    except trust.TrustError as error:
        raise PermissionError(errno.EPERM, f"{error}; have it removed") from None
    for left in trust.left_secrets(str(folder), str(root)):
        with suppress(OSError):
            Path(left).unlink()
    return folder.name, "" if is_new else note


def _close_root(root: Path) -> str:
    """Keep others from renaming what is in a folder; returns a sentence if that was possible before."""
    try:
        trust.check_root(str(root))
    except trust.TrustError as error:
        facts = root.stat()
        if facts.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, str(error)) from None
        root.chmod(stat.S_IMODE(facts.st_mode) | stat.S_ISVTX)
        return f"{root} now has the sticky bit: others may write there, and could have renamed your runs"
    return ""


def make_parents(folder: str, mode: int = 0o755) -> None:
    """Make a folder and its parents; by default only their owner can write to them, whatever the umask.

    Raises:
        OSError: a folder cannot be made.
    """
    missing = [path for path in (Path(folder), *Path(folder).parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=mode, exist_ok=True)


def remove(paths: Sequence[str]) -> None:
    """Remove files, links and whole folders; skip paths that are absent or cannot be removed."""
    for path in map(Path, paths):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def link(links: Mapping[str, str]) -> None:
    """Make symbolic links, path -> target; replace existing files and links."""
    for path, target in links.items():
        with suppress(FileNotFoundError):
            Path(path).unlink()
        Path(path).symlink_to(target)


def stat_paths(paths: Sequence[str]) -> list[PathFacts]:
    """Facts about each path."""
    return [_path_facts(Path(path)) for path in paths]


def home() -> str:
    """The user's home directory."""
    return str(Path.home())


def take_lock(path: str) -> int:
    """Hold a lock file until ``release_lock``, or until this process ends in any way (flock(2)).

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the file cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def release_lock(lock: int) -> None:
    """Release a lock from ``take_lock``."""
    os.close(lock)


@contextmanager
def naming_full(path: str) -> Iterator[None]:
    """Name ``path`` in an error about missing space; the system names no file, or the source of a copy."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(error.errno, error.strerror, path) from None


@contextmanager
def new_folder(folder: str) -> Iterator[str | None]:
    """Temporary folder to fill, renamed to ``folder`` at the end; None if ``folder`` exists.

    The temporary folder is next to ``folder``.

    Raises:
        OSError: the folder cannot be made. After any error the temporary folder is removed.
    """
    target = Path(folder)
    if target.is_dir():
        yield None
        return
    with naming_full(folder):
        make_parents(str(target.parent))
        aside = target.with_name(f".{target.name}.{os.urandom(6).hex()}")
        aside.mkdir(mode=0o755)
        try:
            yield str(aside)
            try:
                aside.rename(target)
            except OSError:
                if not target.is_dir():  # else another process was faster, with the same content
                    raise
        finally:
            shutil.rmtree(str(aside), ignore_errors=True)


def unpack(archive: str, folder: str) -> None:
    """Unpack a tar archive of plain files into ``folder`` atomically, and remove the archive.

    An existing folder stays unchanged.

    Raises:
        OSError: the archive cannot be read, or the folder cannot be written; nothing is left behind.
    """
    try:
        with new_folder(folder) as aside:
            if aside is not None:
                _extract(archive, Path(aside))
    finally:
        remove([archive])


def _extract(archive: str, folder: Path) -> None:
    import tarfile  # importing tarfile takes as long as half of llmctl --help, and only receivers need the module

    with tarfile.open(archive) as opened:
        for member in opened:
            place = place_below(folder, member.name)
            make_parents(str(place.parent))
            content = opened.extractfile(member) if member.isreg() else None
            if content is None:
                raise OSError(errno.EINVAL, "is not a plain file", member.name)
            with content, place.open("xb") as file:
                shutil.copyfileobj(content, file)
            place.chmod(member.mode & 0o755)


def place_below(folder: Path, name: str) -> Path:
    """Path of a file below a folder.

    Raises:
        OSError: the name leads out of the folder.
    """
    if not name or name.startswith("/") or "\0" in name or os.pardir in name.split("/"):
        raise OSError(errno.EINVAL, "leads out of the folder", name)
    return folder / name


def _write(file: FileWrite) -> None:
    path = Path(file.path)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with naming_full(file.path), os.fdopen(descriptor, "wb") as opened:
            os.fchmod(descriptor, file.mode)
            opened.write(file.data)
            opened.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise


def _path_facts(path: Path) -> PathFacts:
    nearest = next(place for place in (path, *path.parents) if _is_there(place))
    kind = _kind(nearest)
    space = None
    with suppress(OSError):  # a dangling link
        space = os.statvfs(nearest)
    return PathFacts(
        kind=kind if nearest == path else "",
        nearest=str(nearest),
        nearest_kind=kind,
        can_write=os.access(nearest, os.W_OK | os.X_OK) if kind == "folder" else os.access(nearest, os.W_OK),
        is_read_only=space is not None and bool(space.f_flag & os.ST_RDONLY),
        free_bytes=space.f_bavail * space.f_frsize if space is not None else 0,
    )


def _is_there(path: Path) -> bool:
    """True if a path exists, or may exist in a folder that cannot be searched."""
    try:
        path.lstat()
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def _kind(path: Path) -> str:
    try:
        return "folder" if path.is_dir() else "file" if path.is_file() else "other"
    except OSError:
        return "other"

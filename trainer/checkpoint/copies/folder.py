"""The folder of a run's copies on one node, safe among the folders of other users. Torch-free.

Every file is opened relative to the folder's descriptor: in a place that all users may write, such as /dev/shm, a name
may be replaced by a link of another user at any time.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trainer.checkpoint.checksums import METADATA_CHECKSUM, checksum_of_metadata

PREFIX = "llmctl-copies-"
"""Start of the name of each run's folder."""
ABANDONED_S = 24 * 3600.0
"""Age of the newest file from which a folder counts as left behind by a run that was killed."""
_HEADER = ".json"
_NAME = re.compile(r"\.?rank-(\d{5,})\.iter-(\d{7,})\.by-(\d{5,})(\.json)?(\.tmp)?")
_MOUNTS = Path("/proc/self/mountinfo")


class CopyName(NamedTuple):
    """One copy of a rank's state.

    Attributes:
        rank: whose state it is.
        iteration: of the state.
        holder: rank that has written the file.
    """

    rank: int
    iteration: int
    holder: int

    def __str__(self) -> str:
        return f"rank-{self.rank:05d}.iter-{self.iteration:07d}.by-{self.holder:05d}"


class CopyFolder:
    """An open folder that belongs to this user, and that nobody else may enter."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Use an open folder; see ``open``."""
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def open(cls, parent: Path, run_id: str) -> CopyFolder:
        """Make or open the folder of a run in ``parent``.

        Raises:
            OSError: the folder cannot be made, is a link, or belongs to another user.
        """
        if parent.is_symlink() and parent.lstat().st_uid not in (0, os.geteuid()):
            raise PermissionError(errno.EPERM, f"{parent} is a link of another user")
        parent.mkdir(parents=True, exist_ok=True)
        path = parent / f"{PREFIX}{run_id}"
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        if path.is_symlink():
            raise PermissionError(errno.EPERM, f"{path} is a link")
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        found = os.fstat(descriptor)
        if found.st_uid == os.geteuid():
            os.fchmod(descriptor, 0o700)
            return cls(path, descriptor)
        os.close(descriptor)
        raise PermissionError(errno.EPERM, f"{path} belongs to user {found.st_uid}")

    def headers(self) -> dict[CopyName, dict[str, Any]]:
        """The headers of all complete copies; one that cannot be read, or is altered, is left out."""
        found = {}
        for text, name in self._files():
            if text == f"{name}{_HEADER}":
                with suppress(OSError, ValueError, KeyError, TypeError), self._open(text, os.O_RDONLY) as file:
                    values = json.loads(file.read())
                    if values[METADATA_CHECKSUM] == checksum_of_metadata(values):
                        found[name] = values
        return found

    def create(self, name: CopyName) -> BinaryIO:
        """A new file for the state of ``name``, past any buffer; ``publish`` gives it the name.

        Raises:
            OSError: the folder takes no file.
        """
        return self._create(f"{name}")

    def publish(self, name: CopyName, header: Mapping[str, Any]) -> None:
        """Give a written file its name, and write its header: from then on the copy is complete.

        Nothing is synced: the copy has to survive its processes, and not the node.

        Raises:
            OSError: the folder takes no file.
        """
        values = {**header, METADATA_CHECKSUM: checksum_of_metadata(header)}
        with self._create(f"{name}{_HEADER}") as file:
            text, written = json.dumps(values).encode(), 0
            while written < len(text):
                written += file.write(text[written:])
        for text_of_name in (f"{name}", f"{name}{_HEADER}"):
            self._rename(f".{text_of_name}.tmp", text_of_name)

    def read_into(self, name: CopyName, target: memoryview) -> None:
        """Fill ``target``, of the size that the header tells, with the state.

        Raises:
            OSError: the file cannot be read, or is shorter.
        """
        with self._open(f"{name}", os.O_RDONLY) as file:
            place = 0
            while place < len(target):
                count = file.readinto(target[place:])  # type: ignore[attr-defined]
                if not count:
                    raise OSError(errno.EIO, f"ends at byte {place:,} of {len(target):,}")
                place += count

    def remove(self, is_wanted: Callable[[CopyName], bool]) -> None:
        """Delete all files of the copies that are wanted no more; those that are gone already do not matter."""
        for text, name in list(self._files()):
            if not is_wanted(name):
                with suppress(OSError):
                    os.unlink(text, dir_fd=self._descriptor)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        total = 0
        for text, _ in self._files():
            with suppress(OSError):
                total += os.stat(text, dir_fd=self._descriptor, follow_symlinks=False).st_size
        return total

    def discard(self) -> None:
        """Delete the folder with all copies, unless another process of the node still writes there."""
        self.remove(lambda _: False)
        with suppress(OSError):
            self.path.rmdir()

    def _files(self) -> Iterator[tuple[str, CopyName]]:
        names: list[str] = []
        with suppress(OSError), os.scandir(self._descriptor) as entries:
            names = [entry.name for entry in entries]
        for text in names:
            match = _NAME.fullmatch(text)
            if match:
                yield text, CopyName(*(int(number) for number in match.groups()[:3]))

    def _create(self, text: str) -> BinaryIO:
        temporary = f".{text}.tmp"
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=self._descriptor)
        return self._open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def _open(self, text: str, flags: int) -> BinaryIO:
        descriptor = os.open(text, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._descriptor)
        return os.fdopen(descriptor, "wb" if flags & os.O_WRONLY else "rb", buffering=0)

    def _rename(self, source: str, target: str) -> None:
        os.rename(source, target, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)


def remove_abandoned(parent: Path, own: Path) -> None:
    """Delete folders of this user's other runs that nothing has written to for a day: what a kill has left behind."""
    try:
        others = [path for path in parent.iterdir() if path.name.startswith(PREFIX) and path != own]
    except OSError:
        return
    for path in others:
        with suppress(OSError):
            found = path.lstat()
            # A new file in a folder changes the time of the folder.
            is_old = time.time() - found.st_mtime > ABANDONED_S
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and is_old:
                CopyFolder.open(parent, path.name.removeprefix(PREFIX)).discard()


def is_in_memory(path: Path) -> bool:
    """True if files in a folder take memory of the node: its file system is a tmpfs or ramfs (proc(5), mountinfo)."""
    best, kind = "", ""
    with suppress(OSError):
        real = f"{path.resolve()}/"
        for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            mount = before.split()[4].rstrip("/") + "/"
            if real.startswith(mount) and len(mount) >= len(best):
                best, kind = mount, after.split()[0]
    return kind in ("tmpfs", "ramfs")

"""Recognition of the empty folder that is left where a mount was."""

from __future__ import annotations

import errno
from pathlib import Path

from trainer.checkpoint.directory import holds_checkpoints


class MountedFolder:
    """Identity of a folder of checkpoints, to notice another one at the same path.

    A file system that is mounted again may have new numbers, and a user may delete all checkpoints. So only another
    folder without checkpoints counts as a mount that is gone. Before the first checkpoint, only another file system
    counts: some network file systems give a folder new numbers while it is mounted.
    """

    def __init__(self) -> None:
        """Know no folder."""
        self._known: tuple[int, int] | None = None
        self._has_held = False

    def remember(self, root: Path) -> None:
        """Remember ``root``, and if it holds checkpoints."""
        self._has_held = holds_checkpoints(root)
        self._known = self._identity_of(root)

    def check(self, root: Path) -> None:
        """Refuse an empty folder at the place of the remembered one.

        Raises:
            OSError: the folder is another one, or is gone.
        """
        if self._known is None:
            return
        device, inode = self._identity_of(root)
        is_same = device == self._known[0] and (inode == self._known[1] or not self._has_held)
        if not is_same and not holds_checkpoints(root):
            raise OSError(errno.ENODEV, "its mount is gone, and an empty folder is in its place")

    @staticmethod
    def _identity_of(root: Path) -> tuple[int, int]:
        facts = root.stat()
        return facts.st_dev, facts.st_ino

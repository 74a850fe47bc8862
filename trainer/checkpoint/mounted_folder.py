"""Recognition of the empty folder that is left where a mount was."""

from __future__ import annotations

import errno
from pathlib import Path

from trainer.checkpoint.directory import holds_checkpoints


class MountedFolder:
    """Identity of a folder of checkpoints, to notice another one at the same path.

    A file system that is mounted again may have new numbers, and a user may delete all checkpoints. So only another
    folder without checkpoints counts as a mount that is gone.
    """

    def __init__(self) -> None:
        """Know no folder."""
        self._identity: tuple[int, int] | None = None

    def remember(self, root: Path) -> None:
        """Remember ``root``, if it holds checkpoints."""
        if holds_checkpoints(root):
            self._identity = self._identity_of(root)

    def check(self, root: Path) -> None:
        """Refuse an empty folder at the place of the remembered one.

        Raises:
            OSError: the folder is another one, or is gone.
        """
        if self._identity is None or self._identity_of(root) == self._identity or holds_checkpoints(root):
            return
        raise OSError(errno.ENODEV, "its mount is gone, and an empty folder is in its place")

    @staticmethod
    def _identity_of(root: Path) -> tuple[int, int]:
        facts = root.stat()
        return facts.st_dev, facts.st_ino

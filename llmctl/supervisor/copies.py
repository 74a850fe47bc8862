"""Copies of the training's state that the ranks of a run have left on this node (trainer/checkpoint/copies)."""

import os
import shutil
import stat
from contextlib import suppress

PREFIX = "llmctl-copies-"
"""Start of the name of each run's folder."""


def remove_copies(folder: str, run_id: str) -> None:
    """Remove the copies of a run that does not begin again in its job, unless another user has made their folder.

    The ranks do so at the end of a run that completes or is stopped. What cannot be removed does not matter here.
    """
    path = os.path.join(folder, PREFIX + run_id)
    with suppress(OSError):
        found = os.lstat(path)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            shutil.rmtree(path, ignore_errors=True)

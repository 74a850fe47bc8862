"""First failure of a part of an attempt, after which the others may wait for ever: in a collective, or stopped."""

import os
from contextlib import suppress
from typing import List, Set

from ..ends import read_ends
from ..restarts import read_rank_failures


class FirstFailure:
    """Look for the first part that has failed by itself. Each record is read once, but for half-written ones."""

    def __init__(self, folder: str) -> None:
        """Look at the attempt in this folder."""
        self._folder = folder
        self._read: Set[str] = set()
        self._has_come = False

    def has_come(self, names: Set[str]) -> bool:
        """True once a part has recorded a failed end, or a rank an error of its own.

        Args:
            names: files of the attempt's folder.
        """
        if self._has_come:
            return True
        ends = {name for name in names if name.startswith("ended-")}
        if not ends <= self._read:
            self._has_come = any(end.code != 0 for end in read_ends(self._folder).values())
            self._read |= ends
        if "errors" in names:
            errors: List[str] = []
            with suppress(OSError):
                errors = os.listdir(f"{self._folder}/errors")
            if not self._read.issuperset(errors):
                self._has_come |= any(not rank.consequence for rank in read_rank_failures(self._folder))
                self._read.update(errors)
        return self._has_come

"""Bundled templates as compiled, beside them in __pycache__, as Python keeps its own modules.

Compiling a job script anew costs 20 of 210 ms of a dry run (Zen 4). A copy is taken only if it was made from the same
text by the same versions of Python and Jinja, which Jinja checks; one that cannot be written is done without.
"""

from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError

from jinja2 import FileSystemBytecodeCache
from jinja2.bccache import Bucket


class TemplateCache(FileSystemBytecodeCache):
    """Jinja's cache in files, in a place of ours, and silent where that is read-only."""

    def __init__(self, templates: Path, *, may_write: bool) -> None:
        """Keep what belongs to the folder ``templates``; without ``may_write`` only what is there is read."""
        super().__init__(str(templates / "__pycache__"), "%s.jinja")
        self._may_write = may_write

    def load_bytecode(self, bucket: Bucket) -> None:
        """Take a copy, if there is a readable one."""
        with suppress(OSError, EOFError, ValueError, TypeError, UnpicklingError):
            super().load_bytecode(bucket)

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Leave a copy, if that is possible."""
        if not self._may_write:
            return
        with suppress(OSError):
            Path(self.directory).mkdir(exist_ok=True)
            super().dump_bytecode(bucket)

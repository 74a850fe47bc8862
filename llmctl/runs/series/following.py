"""The history of a run whose metrics.jsonl grows: new bytes only."""

from collections.abc import Sequence

from llmctl.runs.metrics import ReadParts
from llmctl.runs.series.columns import parse_columns
from llmctl.runs.series.history import RunHistory
from llmctl.runs.series.reading import CHUNK
from llmctl.transport.file_reads import FileRead


class HistoryFollower:
    """Follows one metrics.jsonl; each ``poll`` reads only the bytes appended since the previous one."""

    def __init__(self, path: str, read: ReadParts, keys: Sequence[str]) -> None:
        """Read ``path`` through ``read``, a transport's ``read_parts``.

        Args:
            path: the file.
            read: reads parts of files.
            keys: keys or patterns of keys.
        """
        self.history = RunHistory()
        self._path = path
        self._read = read
        self._keys = keys
        self._offset = 0
        self._partial = b""

    def poll(self) -> bool:
        """Read to the end of the file; True if there was anything new. A file that became shorter is read again."""
        is_new = False
        while True:
            (part,) = self._read([FileRead(self._path, self._offset, CHUNK)])
            if part is None:
                return is_new
            if part.size < self._offset:
                self._offset, self._partial, self.history = 0, b"", RunHistory()
                continue
            cut = part.data.rfind(b"\n") + 1
            if cut:
                self.history.add(parse_columns(self._partial + part.data[:cut], self._keys))
                self._partial, is_new = part.data[cut:], True
            else:
                self._partial += part.data
            self._offset = part.end
            if self._offset >= part.size or not part.data:
                return is_new

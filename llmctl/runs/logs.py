"""Log files of a run: listing, last lines, and following many files by byte offset.

Logs hold arbitrary output: binary data, lines of megabytes, progress bars, half lines. Reads are bounded blocks of
bytes, cleaned for the terminal. ``--download`` copies the files unchanged.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from llmctl.terminal_text import printable
from llmctl.transport.file_reads import DEFAULT_LIMIT, FilePart, FileRead

ReadParts = Callable[[Sequence[FileRead]], list[FilePart | None]]

LONGEST_LINE = 16 * 1024
"""Most bytes shown of one line: far above the longest line of a traceback or a config dump."""
TAIL_BLOCK = 64 * 1024
TAIL_LIMIT = 8 * 1024 * 1024
"""Most bytes searched for the last lines of one file: bounds the read of a file that is one endless line."""
AT_ONCE = 32 * 1024 * 1024
"""Most bytes of all followed files per poll, so that a poll stays one round trip for any number of ranks."""

_RANK_LOG = re.compile(r"rank-(\d{5,})\.log")
_NODE_LOG = re.compile(r"node-(\d{5,})\.log")


def rank_logs(names: Iterable[str]) -> dict[int, str]:
    """Rank -> file name, from an attempt's file names."""
    return {int(match[1]): name for name in sorted(names) if (match := _RANK_LOG.fullmatch(name))}


def node_logs(names: Iterable[str]) -> dict[int, str]:
    """Node -> file name, from an attempt's file names."""
    return {int(match[1]): name for name in sorted(names) if (match := _NODE_LOG.fullmatch(name))}


def clean(line: bytes, dropped: int = 0) -> str:
    """Make a line safe to show: bounded text without escape sequences or control characters.

    Keeps only the last state of a progress bar, which overwrites itself with carriage returns.

    Args:
        line: the line's bytes, without the newline.
        dropped: bytes of the line that were dropped earlier.
    """
    shown = line.rstrip(b"\r").rpartition(b"\r")[2]
    dropped += max(0, len(shown) - LONGEST_LINE)
    text = printable(shown[:LONGEST_LINE].decode("utf-8", errors="replace"))
    return f"{text} ... [{dropped} more bytes]" if dropped else text


@dataclass
class LogTail:
    """One followed file: its read offset and its unfinished last line."""

    path: str
    offset: int = 0
    partial: bytes = field(default=b"", repr=False)
    dropped: int = 0

    def take(self, data: bytes) -> list[str]:
        """The lines that ``data`` completes, cleaned. Only the beginning of an endless line stays in memory."""
        *ended, rest = data.split(b"\n")
        lines = []
        for piece in ended:
            self._extend(piece)
            lines.append(self._end_line())
        self._extend(rest)
        return lines

    def flush(self) -> list[str]:
        """The last line if it lacks a newline: the file is complete."""
        return [self._end_line()] if self.partial else []

    def restart(self) -> None:
        """Start again at the beginning of the file."""
        self.offset, self.partial, self.dropped = 0, b"", 0

    def _extend(self, block: bytes) -> None:
        _, carriage_return, last = block.rpartition(b"\r")
        if carriage_return and last:
            # A progress bar may be one endless line too; overwritten states are never shown.
            self.partial, self.dropped, block = b"", 0, last
        whole = self.partial + block
        self.dropped += max(0, len(whole) - LONGEST_LINE)
        self.partial = whole[:LONGEST_LINE]

    def _end_line(self) -> str:
        line = clean(self.partial, self.dropped)
        self.partial, self.dropped = b"", 0
        return line


@dataclass(frozen=True)
class LogLine:
    """One line of one source (``rank 3``, ``node 0``, ``job``), cleaned for showing."""

    source: str
    text: str

    def __str__(self) -> str:
        return f"[{self.source}] {self.text}"


class LogFollower:
    """Follows the files of many sources at once; one ``poll`` is one round trip.

    A missing file is waited for. A file that has become shorter is read again from its start.
    """

    def __init__(self, read: ReadParts) -> None:
        """Read through ``read``, a transport's ``read_parts``."""
        self._read = read
        self._tails: dict[str, LogTail] = {}
        self._ready: list[LogLine] = []

    def follow(self, files: Mapping[str, str], offsets: Mapping[str, int]) -> None:
        """Follow exactly these files: source -> path.

        Files already followed continue. New files begin at their offset (by source; absent: the start). Files not
        listed are dropped.
        """
        tails = {}
        for source, path in files.items():
            known = self._tails.get(source)
            tails[source] = known if known and known.path == path else LogTail(path, offsets.get(source, 0))
        self._tails = tails

    def poll(self) -> list[LogLine]:
        """The lines completed since the last poll, in order of source.

        After a partly failed read, the lines already read are kept for the next poll.
        """
        waiting = dict(self._tails)
        while waiting:
            limit = min(DEFAULT_LIMIT, max(TAIL_BLOCK, AT_ONCE // len(waiting)))
            parts = self._read([FileRead(tail.path, tail.offset, limit) for tail in waiting.values()])
            again: dict[str, LogTail] = {}
            for (source, tail), part in zip(waiting.items(), parts, strict=True):
                if part is None:
                    continue
                if part.size < tail.offset:
                    tail.restart()
                    again[source] = tail
                    continue
                self._ready += [LogLine(source, line) for line in tail.take(part.data)]
                tail.offset = part.end
                if part.data and part.end < part.size:
                    again[source] = tail
            waiting = again
        lines, self._ready = self._ready, []
        return lines

    def flush(self) -> list[LogLine]:
        """The unfinished last lines, once the run has ended."""
        return [LogLine(source, line) for source, tail in self._tails.items() for line in tail.flush()]


def last_lines(read: ReadParts, paths: Sequence[str], count: int, *, whole_only: bool) -> list[tuple[list[str], int]]:
    """The last ``count`` lines of each file, cleaned, and the offset for following.

    Reads backwards in growing blocks: one round trip per block size for all files, at most TAIL_LIMIT bytes of a file.

    Args:
        read: a transport's ``read_parts``.
        paths: the files; a missing file has no lines.
        count: number of lines per file.
        whole_only: omit a last line without a newline and return the offset of its start, so that the follower shows
            the line once it is complete.
    """
    found: dict[int, tuple[list[str], int]] = {}
    block = TAIL_BLOCK
    while len(found) < len(paths):
        missing = [index for index in range(len(paths)) if index not in found]
        parts = read([FileRead(paths[index], -block, block) for index in missing])
        for index, part in zip(missing, parts, strict=True):
            if part is None:
                found[index] = ([], 0)
            elif part.offset == 0 or part.data.count(b"\n") > count or block >= TAIL_LIMIT:
                found[index] = _lines_of(part, count, whole_only=whole_only)
        block = min(block * 8, TAIL_LIMIT)
    return [found[index] for index in range(len(paths))]


def _lines_of(part: FilePart, count: int, *, whole_only: bool) -> tuple[list[str], int]:
    *lines, rest = part.data.split(b"\n")
    if part.offset > 0:
        # The block began somewhere inside its first line.
        lines = lines[1:]
    end = part.end - len(rest) if whole_only else part.end
    if rest and not whole_only:
        lines.append(rest)
    return [clean(line) for line in lines[max(0, len(lines) - count) :]], end

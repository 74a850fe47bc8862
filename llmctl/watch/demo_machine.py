"""A machine and a queue of a demonstration: files that grow with a clock, in memory, and the answers about its jobs."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from llmctl.backends import load_queue_backend
from llmctl.backends.base import QueueBackend
from llmctl.runs.job_status import JobQuestion
from llmctl.runs.state import JobAnswer
from llmctl.transport.file_reads import FilePart, FileRead

Clock = Callable[[], float]
"""Seconds since 1970, as the demonstration shows them."""


@dataclass
class GrowingFile:
    """A file whose pieces appear at their times, or whose content is a function of the time.

    Attributes:
        times: of each piece, ascending.
        ends: offset of the end of each piece.
        data: all pieces.
        content: the content at a time, None before the file exists; used without pieces.
    """

    times: list[float] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)
    content: Callable[[float], bytes | None] | None = None

    def add(self, time: float, piece: bytes) -> None:
        """Add a piece, not before the last one."""
        self.data += piece
        self.times.append(time)
        self.ends.append(len(self.data))

    def at(self, now: float) -> bytes | None:
        """The content at a time; None before the file exists."""
        if self.content is not None:
            return self.content(now)
        count = bisect_right(self.times, now)
        return bytes(self.data[: self.ends[count - 1]]) if count else None


@dataclass
class DemoMachine:
    """The files of the demonstration. Answers what a page of a run asks of a Transport."""

    clock: Clock
    files: dict[str, GrowingFile] = field(default_factory=dict)
    host: str = "demo"
    is_remote: bool = False

    def now(self) -> float:
        """See Transport."""
        return self.clock()

    def read_parts(self, reads: Sequence[FileRead]) -> list[FilePart | None]:
        """See file_reads."""
        now = self.clock()
        return [self._part(read, now) for read in reads]

    def list_names(self, directories: Sequence[str]) -> list[list[str]]:
        """See file_reads."""
        now = self.clock()
        present = [path for path, file in self.files.items() if file.at(now) is not None]
        return [
            sorted({path[len(folder) + 1 :].partition("/")[0] for path in present if path.startswith(f"{folder}/")})
            for folder in directories
        ]

    def _part(self, read: FileRead, now: float) -> FilePart | None:
        file = self.files.get(read.path)
        data = file.at(now) if file is not None else None
        if data is None:
            return None
        offset = max(0, len(data) + read.offset) if read.offset < 0 else min(read.offset, len(data))
        return FilePart(data[offset : offset + read.limit], offset, len(data))


@dataclass(frozen=True)
class DemoQueue:
    """A scheduler that knows each job by a function of the time. Stands for a SchedulerWatch."""

    clock: Clock
    jobs: Mapping[str, Callable[[float], JobAnswer]]
    backend: QueueBackend | None = field(default_factory=partial(load_queue_backend, "slurm"))

    def ask_queue(self, questions: Sequence[JobQuestion]) -> list[JobAnswer | None]:
        """See SchedulerWatch."""
        now = self.clock()
        return [self.jobs[question.record.run_id](now) for question in questions]

    def ask_accounting(self, questions: Sequence[JobQuestion], signs_of_life: Sequence[float]) -> list[JobAnswer]:
        """See SchedulerWatch."""
        now = self.clock()
        return [self.jobs[question.record.run_id](now) for question, _ in zip(questions, signs_of_life, strict=True)]

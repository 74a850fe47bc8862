"""The small files of all attempts of a run, in a fixed number of round trips."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmctl.runs.facts import (
    Ending,
    Heartbeat,
    Outcome,
    RankError,
    Started,
    first_error,
    parse_alive,
    parse_ending,
    parse_error,
    parse_heartbeat,
    parse_hostfile,
    parse_outcome,
    parse_started,
)
from llmctl.runs.log_selection import ranks_of_errors
from llmctl.runs.record import RunRecord
from llmctl.transport.file_reads import FilePart, FileRead
from llmctl.transport.protocol import Transport

MOST_ERRORS = 64
"""Errors of ranks that are read of an attempt: all of them, unless a whole large job lost its connections."""
_FILES = ("started.json", "exit.json", "outcome.json", "alive.json", "hostfile")
_SMALL = 16 * 1024
_GOOD = ("completed", "stopped", "cancelled", "timeout")


@dataclass(frozen=True)
class AttemptFiles:
    """One attempt by its files.

    Attributes:
        number: of the attempt.
        started: None if the file is missing, as all of these.
        ending: of the supervisor.
        outcome: of rank 0.
        hosts: of the hostfile.
        errors: of the ranks that failed.
        silent: last heartbeats of the ranks without an error, where others have one.
        alive: last sign of life of the supervisor, in seconds since 1970.
        names: of the files in the attempt's folder.
    """

    number: int
    started: Started | None
    ending: Ending | None
    outcome: Outcome | None = None
    hosts: tuple[str, ...] = ()
    errors: tuple[RankError, ...] = ()
    silent: tuple[Heartbeat, ...] = ()
    alive: float | None = None
    names: tuple[str, ...] = ()

    @property
    def error(self) -> RankError | None:
        """Error of the rank that failed first."""
        return first_error(self.errors)

    @property
    def span(self) -> tuple[float, float] | None:
        """Start and end by the clock of the supervisor, as far as its files tell; None before the start."""
        began = self.started.time if self.started is not None else None
        if began is None:
            return None
        ended = self.ending.time if self.ending is not None else self.alive
        return began, began if ended is None else max(began, ended)

    @property
    def has_failed(self) -> bool:
        """True if the attempt ended badly, or left an error."""
        if self.ending is None:
            return self.error is not None
        return self.ending.reason not in _GOOD and self.ending.code != 0


def read_attempt_files(record: RunRecord, transport: Transport) -> list[AttemptFiles]:
    """All attempts of a run, in order. Costs three round trips."""
    return read_attempts_of([record], transport)[0]


def read_attempts_of(
    records: Sequence[RunRecord], transport: Transport, *, newest: int | None = None
) -> list[list[AttemptFiles]]:
    """The attempts of each run, in order. Costs three round trips.

    Args:
        records: the runs.
        transport: the machine of their directories.
        newest: most attempts of a run, the last ones; None: all.
    """
    roots = [f"{record.run_dir}/attempts" for record in records]
    listed = transport.list_names(roots) if roots else []
    numbers = [sorted(int(name) for name in names if name.isdecimal())[-(newest or 0) :] for names in listed]
    folders = [f"{root}/{number}" for root, present in zip(roots, numbers, strict=True) for number in present]
    within = [f"{folder}{end}" for folder in folders for end in ("", "/errors", "/heartbeat")]
    names = transport.list_names(within) if within else []
    failed = [ranks_of_errors(errors) for errors in names[1::3]]
    # Heartbeats have the file names of errors.
    silent = [
        sorted(set(ranks_of_errors(beats)) - set(ranks))[:MOST_ERRORS] if ranks else []
        for ranks, beats in zip(failed, names[2::3], strict=True)
    ]
    failed = [ranks[:MOST_ERRORS] for ranks in failed]
    reads = []
    for folder, ranks, others in zip(folders, failed, silent, strict=True):
        reads += [FileRead(f"{folder}/{name}", limit=_SMALL) for name in _FILES]
        reads += [FileRead(f"{folder}/errors/rank-{rank:05d}.json") for rank in ranks]
        reads += [FileRead(f"{folder}/heartbeat/rank-{rank:05d}.json", limit=_SMALL) for rank in others]
    parts = iter(transport.read_parts(reads) if reads else [])
    of_folders = iter(zip(map(len, failed), map(len, silent), names[::3], strict=True))
    return [[_attempt(number, *next(of_folders), parts) for number in present] for present in numbers]


def _attempt(
    number: int, failed: int, silent: int, names: Sequence[str], parts: Iterator[FilePart | None]
) -> AttemptFiles:
    """The attempt of the next parts: its files, errors of ``failed`` ranks and heartbeats of ``silent`` ones."""
    started, ending, outcome, alive, hosts = (_data(next(parts)) for _ in _FILES)
    errors = [error for _ in range(failed) if (error := parse_error(_data(next(parts)))) is not None]
    beats = [beat for _ in range(silent) if (beat := parse_heartbeat(_data(next(parts)))) is not None]
    return AttemptFiles(
        number,
        parse_started(started),
        parse_ending(ending),
        parse_outcome(outcome),
        parse_hostfile(hosts),
        tuple(errors),
        tuple(beats),
        parse_alive(alive),
        tuple(names),
    )


def _data(part: FilePart | None) -> bytes | None:
    return part.data if part is not None else None

"""Read attempts/K of many runs in a fixed number of round trips."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from llmctl.runs.facts import (
    AttemptFacts,
    Ending,
    Heartbeat,
    Outcome,
    RankError,
    Started,
    parse_alive,
    parse_ending,
    parse_error,
    parse_heartbeat,
    parse_hostfile,
    parse_outcome,
    parse_started,
)
from llmctl.runs.links import Link, newest_link_file, parse_link
from llmctl.runs.record import RunRecord
from llmctl.transport.file_reads import FilePart, FileRead
from llmctl.transport.protocol import Transport

_SMALL = 16 * 1024
"""Bytes read of a file with one small object: small limits let one connection carry many files at once."""
_HOSTFILE = 64 * 1024
MAX_STARTS = 20
"""Most attempts whose started.json is read: more requeues than a scheduler makes before somebody steps in."""
HEARTBEATS_EVERY_S = (15.0, 30.0)
"""Shortest (few ranks) and longest interval between reads of all heartbeats of a followed attempt."""
RANKS_PER_SECOND = 256


@dataclass(frozen=True)
class AttemptBeginning:
    """The newest attempt of a run: number, directory, job.sh's processes, ending."""

    number: int
    directory: PurePosixPath
    started: Started | None
    ending: Ending | None = None
    outcome: Outcome | None = None
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunAttempts:
    """Attempts of a run, and the newest attempt of its last submission.

    Attributes:
        newest: the last attempt of the last submission; None before the first.
        count: number of attempts of all submissions.
        of_submission: number of attempts of the last submission.
        waiting: the next job of a chain, if it has made no attempt yet.
    """

    newest: AttemptBeginning | None
    count: int = 0
    of_submission: int = 0
    waiting: Link | None = None


def find_attempts(records: Sequence[RunRecord], transport: Transport) -> list[RunAttempts]:
    """The attempts of each run, in order. Costs two round trips."""
    folders = [PurePosixPath(str(record.run_dir)) / "attempts" for record in records]
    listed = transport.list_names([str(folder) for folder in folders]) if folders else []
    numbers = [sorted(int(name) for name in names if name.isdecimal()) for names in listed]
    links = [
        newest_link_file(names, _last_number(record)) if present else ""
        for record, names, present in zip(records, listed, numbers, strict=True)
    ]
    reads: list[FileRead] = []
    for folder, present, link in zip(folders, numbers, links, strict=True):
        if present:
            starts = [f"{folder}/{number}/started.json" for number in present[-MAX_STARTS:]]
            newest = f"{folder}/{present[-1]}"
            small = [*starts, f"{newest}/exit.json", f"{newest}/outcome.json"]
            reads += [
                *(FileRead(path, limit=_SMALL) for path in small),
                FileRead(f"{newest}/hostfile", limit=_HOSTFILE),
                *([FileRead(f"{folder}/{link}", limit=_SMALL)] if link else []),
            ]
    parts = iter(transport.read_parts(reads) if reads else [])
    found = []
    for record, folder, present, link in zip(records, folders, numbers, links, strict=True):
        own = [next(parts) for _ in range(min(len(present), MAX_STARTS) + 3)] if present else []
        answer = parse_link(_data(next(parts))) if link else None
        found.append(_attempts(record, folder, present, own, answer))
    return found


def newest_attempt(record: RunRecord, transport: Transport) -> AttemptBeginning | None:
    """The last attempt of the run's last submission; None before the first."""
    return find_attempts([record], transport)[0].newest


def attempt_numbers(record: RunRecord, transport: Transport) -> list[int]:
    """Numbers of all attempts of a run, ascending."""
    (names,) = transport.list_names([str(record.run_dir / "attempts")])
    return sorted(int(name) for name in names if name.isdecimal())


@dataclass
class _CachedDetails:
    """Heartbeats and errors read of one attempt, and the supervisor's sign of life at that time."""

    had_ended: bool
    read: float
    heartbeats: tuple[Heartbeat, ...]
    alive: float | None
    errors: dict[str, RankError] = field(default_factory=dict)


class DetailsMemory:
    """Cache of heartbeats and errors, for repeated observation of runs with thousands of ranks.

    Heartbeats are read again after an interval, and once the attempt has ended. Errors never change.
    """

    def __init__(self) -> None:
        self._kept: dict[PurePosixPath, _CachedDetails] = {}

    def heartbeats(self, one: AttemptBeginning) -> _CachedDetails | None:
        """Cached heartbeats of an attempt; None if a new read is due."""
        kept = self._kept.get(one.directory)
        if kept is None or not kept.heartbeats or kept.had_ended != (one.ending is not None):
            return None
        least, most = HEARTBEATS_EVERY_S
        interval_s = min(most, least + len(kept.heartbeats) / RANKS_PER_SECOND)
        return kept if time.monotonic() - kept.read < interval_s else None

    def keep(
        self, one: AttemptBeginning, heartbeats: Sequence[Heartbeat | None], alive: float | None
    ) -> _CachedDetails:
        """Cache heartbeats that were just read."""
        errors = self.errors(one)
        known = tuple(beat for beat in heartbeats if beat is not None)
        self._kept[one.directory] = _CachedDetails(one.ending is not None, time.monotonic(), known, alive, errors)
        return self._kept[one.directory]

    def errors(self, one: AttemptBeginning) -> dict[str, RankError]:
        """Cached errors of an attempt, by file name."""
        kept = self._kept.get(one.directory)
        return kept.errors if kept is not None else {}


def read_details(
    beginnings: Sequence[AttemptBeginning | None],
    further: Sequence[FileRead],
    transport: Transport,
    memory: DetailsMemory | None = None,
) -> tuple[list[AttemptFacts | None], list[FilePart | None]]:
    """Read heartbeats and errors where needed, and ``further``. Costs two round trips.

    Args:
        beginnings: the attempts.
        further: more files to read in the same round trip.
        transport: the machine of all these files.
        memory: cache of earlier reads.
    """
    memory = memory or DetailsMemory()
    wanted = [one for one in beginnings if one is not None and _needs_details(one)]
    kept = [memory.heartbeats(one) for one in wanted]
    # One listing and one reading for all runs, because each costs a round trip; the answers are taken apart in order.
    folders = [f"{one.directory}{name}" for one in wanted for name in ("", "/errors")]
    folders += [f"{one.directory}/heartbeat" for one, known in zip(wanted, kept, strict=True) if known is None]
    listed = transport.list_names(folders) if folders else []
    beating = iter(listed[2 * len(wanted) :])
    beats = [_json_names(next(beating)) if known is None else [] for known in kept]
    errors = [
        [name for name in _json_names(names) if name not in memory.errors(one)]
        for one, names in zip(wanted, listed[1 : 2 * len(wanted) : 2], strict=True)
    ]
    reads = list(further)
    for one, known, beat_names, error_names in zip(wanted, kept, beats, errors, strict=True):
        if known is None:
            reads.append(FileRead(f"{one.directory}/alive.json", limit=_SMALL))
        reads += [FileRead(f"{one.directory}/heartbeat/{name}", limit=_SMALL) for name in beat_names]
        reads += [FileRead(f"{one.directory}/errors/{name}") for name in error_names]
    found = transport.read_parts(reads) if reads else []
    parts = iter(found[len(further) :])
    details = {}
    for position, one in enumerate(wanted):
        known = kept[position]
        if known is None:
            alive = parse_alive(_data(next(parts)))
            heartbeats = [parse_heartbeat(_data(next(parts))) for _ in beats[position]]
            known = memory.keep(one, heartbeats, alive)
        failures = {name: parse_error(_data(next(parts))) for name in errors[position]}
        known.errors.update((name, failure) for name, failure in failures.items() if failure is not None)
        details[id(one)] = AttemptFacts(
            number=one.number,
            cancel_marked="cancel" in listed[2 * position],
            heartbeats=known.heartbeats,
            heartbeats_age_s=time.monotonic() - known.read,
            alive=known.alive,
            errors=tuple(sorted(known.errors.values(), key=lambda error: (error.time, error.rank))),
        )
    return [_facts(one, details.get(id(one))) for one in beginnings], found[: len(further)]


def _attempts(
    record: RunRecord,
    folder: PurePosixPath,
    numbers: Sequence[int],
    parts: Sequence[FilePart | None],
    link: Link | None,
) -> RunAttempts:
    if not numbers:
        return RunAttempts(None)
    starts = [parse_started(_data(part)) for part in parts[:-3]]
    submission = _last_number(record)
    # An attempt without a started.json is just beginning, and so belongs to the last submission.
    own = [one for one in starts if one is None or None in (one.submission, submission) or one.submission == submission]
    newest = starts[-1]
    if newest is not None and newest not in own:
        return RunAttempts(None, len(numbers))
    ending, outcome, hostfile = (_data(part) for part in parts[-3:])
    beginning = AttemptBeginning(
        numbers[-1],
        folder / str(numbers[-1]),
        newest,
        parse_ending(ending),
        parse_outcome(outcome),
        parse_hostfile(hostfile),
    )
    waits = link is not None and newest is not None and newest.link < link.number
    return RunAttempts(beginning, len(numbers), len(own), link if waits else None)


def _last_number(record: RunRecord) -> int | None:
    return record.submissions[-1].number if record.submissions else None


def _needs_details(beginning: AttemptBeginning) -> bool:
    """True if heartbeats and errors add information. False after a good or requested ending."""
    ending = beginning.ending
    if ending is None or not ending.is_final:
        return True
    if ending.reason == "timeout":
        # A run that did not save at its limit may have hung.
        return beginning.outcome is None
    return ending.reason not in ("completed", "stopped", "cancelled")


def _facts(beginning: AttemptBeginning | None, details: AttemptFacts | None) -> AttemptFacts | None:
    if beginning is None:
        return None
    return AttemptFacts(
        number=beginning.number,
        started=beginning.started,
        ending=beginning.ending,
        outcome=beginning.outcome,
        cancel_marked=details is not None and details.cancel_marked,
        heartbeats=details.heartbeats if details is not None else (),
        heartbeats_age_s=details.heartbeats_age_s if details is not None else 0.0,
        alive=details.alive if details is not None else None,
        errors=details.errors if details is not None else (),
        hosts=beginning.hosts,
    )


def _json_names(names: Sequence[str]) -> list[str]:
    # Names that begin with a dot are temporary: the writer renames them when they are complete.
    return [name for name in names if name.endswith(".json") and not name.startswith(".")]


def _data(part: FilePart | None) -> bytes | None:
    return part.data if part is not None else None

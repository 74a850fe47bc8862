"""Flight records of torch: the collectives that each rank has entered, and the ranks that the others wait for.

The format is that of torch 2.5 and later, a pickle per rank
(https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html). A record is read without running any of its
code. A rank is named for one of two reasons:

* Others wait for it and it waits for nobody: its program is stuck outside of communication.
* It has not ended a collective that another member has: its device is stuck.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from llmctl.transport.file_reads import FileRead

if TYPE_CHECKING:
    from llmctl.transport.protocol import Transport

_MADE_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that no member can end before all have entered them; a broadcast's source can."""
_FILE = re.compile(r"rank_(\d{1,6})")
_MOST_RECORDS, _MOST_BYTES = 4096, 1 << 24
_MOST_NAMED = 8
_PEER = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
"""``nccl:send 0->3`` and ``nccl:recv 0<-3``, with ranks of the group; the first one is the own."""


class FlightRecordError(ValueError):
    """A file is not a flight record."""


class Operation(NamedTuple):
    """An operation that a rank has entered and not ended.

    Attributes:
        group: name of the process group, the same on all its ranks.
        number: of the collective in its group; of a message, that of the pair's messages.
        name: such as ``all_reduce``, or ``recv 0<-3``.
        is_message: a send or receive of two ranks.
    """

    group: str
    number: int
    name: str
    is_message: bool


@dataclass(frozen=True)
class FlightRecord:
    """The record of one rank.

    Attributes:
        rank: of the job.
        pending: operations entered and not ended, the oldest first.
        groups: name of a group -> its ranks.
        descriptions: name of a group -> the program's words for it.
    """

    rank: int
    pending: tuple[Operation, ...]
    groups: Mapping[str, tuple[int, ...]]
    descriptions: Mapping[str, str]


@dataclass(frozen=True)
class Guilty:
    """A rank that holds the others up.

    Attributes:
        rank: of the job.
        operation: the oldest operation in which others wait for it, or that it has not ended.
        waiting: the ranks that wait for it.
        is_stuck_device: it has entered the operation, and others have ended it.
    """

    rank: int
    operation: Operation
    waiting: tuple[int, ...]
    is_stuck_device: bool

    def sentence(self, groups: Mapping[str, str]) -> str:
        """The guilt in one line; ``groups``: name of a group -> the program's words for it."""
        one = self.operation
        words = groups.get(one.group, "")
        what = f"{one.name} {one.number} of group {words or one.group}"
        others = _ranks(self.waiting)
        if self.is_stuck_device:
            waiting = f"; {others}" if self.waiting else ""
            return f"rank {self.rank} holds the others up: its device has not ended {what}, which others have{waiting}"
        return f"rank {self.rank} holds the others up: it has not entered {what}; {others}"


def _ranks(waiting: Sequence[int]) -> str:
    shown = ", ".join(map(str, waiting[:_MOST_NAMED])) + (", ..." if len(waiting) > _MOST_NAMED else "")
    return f"rank{'s' if len(waiting) > 1 else ''} {shown} wait{'' if len(waiting) > 1 else 's'} for it"


def guilty_by_flight_records(folder: str, transport: "Transport") -> tuple[str, ...]:
    """Sentences on the ranks that hold the others up, by the records in a folder; empty without records.

    Raises:
        SchedulerError: the machine cannot be reached.
    """
    (names,) = transport.list_names([folder])
    ranks = sorted(int(match[1]) for name in names if (match := _FILE.fullmatch(name)))[:_MOST_RECORDS]
    parts = transport.read_parts([FileRead(f"{folder}/rank_{rank}", limit=_MOST_BYTES) for rank in ranks])
    records: list[FlightRecord] = []
    for rank, part in zip(ranks, parts, strict=True):
        with suppress(FlightRecordError):
            records += [parse_record(rank, part.data)] if part is not None else []
    words = {name: text for record in records for name, text in record.descriptions.items()}
    return tuple(one.sentence(words) for one in find_guilty(records))


def parse_record(rank: int, data: bytes) -> FlightRecord:
    """Read a record.

    Raises:
        FlightRecordError: it is not one, or needs code to be read.
    """
    import ast
    import io
    import pickle

    class Plain(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise FlightRecordError(f"it would run {module}.{name}")

    try:
        values = Plain(io.BytesIO(data)).load()
        config = values["pg_config"]
        groups = {str(one["name"]): tuple(map(int, ast.literal_eval(one["ranks"]))) for one in config.values()}
        descriptions = {str(one["name"]): str(one["desc"]) for one in config.values()}
        entries = [_operation(entry) for entry in values["entries"] if not _has_ended(entry)]
    except FlightRecordError:
        raise
    except Exception as error:
        raise FlightRecordError(f"it is not a flight record: {type(error).__name__}: {error}") from None
    return FlightRecord(rank, tuple(entries), groups, descriptions)


def _has_ended(entry: Mapping[str, Any]) -> bool:
    # NCCL's watchdog sets the state; gloo only retires what has ended.
    return entry["state"] == "completed" or bool(entry.get("retired"))


def _operation(entry: Mapping[str, Any]) -> Operation:
    is_message = bool(entry["is_p2p"])
    number = int(entry["p2p_seq_id" if is_message else "collective_seq_id"])
    return Operation(str(entry["process_group"][0]), number, str(entry["profiling_name"]).partition(":")[2], is_message)


def find_guilty(records: Sequence[FlightRecord]) -> list[Guilty]:
    """The ranks that hold the others up, by rank; empty if the records name none."""
    graph = _Graph(records)
    # A message says less than a collective: its sender may have ended it, while the receiver has not.
    return graph.guilty(with_messages=False) or graph.guilty(with_messages=True)


class _Graph:
    """Who waits for whom."""

    def __init__(self, records: Sequence[FlightRecord]) -> None:
        self._records = {record.rank: record for record in records}
        self._members = {name: ranks for record in records for name, ranks in record.groups.items()}
        self._collectives: dict[tuple[int, str], list[int]] = defaultdict(list)
        self._partners: set[tuple[int, int, str]] = set()
        for record in records:
            for one in record.pending:
                if not one.is_message:
                    self._collectives[record.rank, one.group].append(one.number)
                elif (partner := self._partner(record.rank, one)) is not None:
                    self._partners.add((record.rank, partner, one.group))

    def guilty(self, *, with_messages: bool) -> list[Guilty]:
        """The ranks whose device is stuck, and those that are waited for and wait for nobody."""
        awaited: dict[int, dict[int, Operation]] = defaultdict(dict)
        waiting: set[int] = set()
        stuck: dict[int, Operation] = {}
        for rank, record in self._records.items():
            for one in record.pending:
                if not one.is_message and rank not in stuck and self._has_ended_elsewhere(rank, one):
                    stuck[rank] = one
                for other in self._absent(rank, one, with_messages=with_messages):
                    waiting.add(rank)
                    awaited[other].setdefault(rank, one)
        idle = {rank: next(iter(waiters.values())) for rank, waiters in awaited.items() if rank not in waiting}
        return [
            Guilty(rank, operation, tuple(sorted(awaited.get(rank, ()))), rank in stuck)
            for rank, operation in sorted({**idle, **stuck}.items())
        ]

    def _has_ended_elsewhere(self, rank: int, one: Operation) -> bool:
        """True if another member has ended a collective that only all of them can end."""
        if not any(name in one.name for name in _MADE_TOGETHER):
            return False
        others = (other for other in self._members.get(one.group, ()) if other != rank)
        return any(min(self._collectives.get((other, one.group), [one.number])) > one.number for other in others)

    def _absent(self, rank: int, one: Operation, *, with_messages: bool) -> Iterator[int]:
        """The ranks that have not entered an operation of ``rank``, nor ended it."""
        if one.is_message:
            partner = self._partner(rank, one)
            if with_messages and partner is not None and (partner, rank, one.group) not in self._partners:
                yield partner
            return
        for other in self._members.get(one.group, ()):
            if other != rank and max(self._collectives.get((other, one.group), [-1])) < one.number:
                yield other

    def _partner(self, rank: int, message: Operation) -> int | None:
        match, ranks = _PEER.fullmatch(message.name), self._members.get(message.group, ())
        if match is None or rank not in ranks or int(match[3]) >= len(ranks):
            return None
        return ranks[int(match[3])]

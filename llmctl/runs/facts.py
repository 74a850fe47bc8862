"""The contents of a run directory's files as values. Pure: bytes in, facts out.

No parser here fails on a missing, half-written or foreign file: unreadable values are None. llmctl.runs.state decides
the run's state from the remaining values.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmctl.runs.json_values import float_of, int_of, mapping_of, text_of
from llmctl.supervisor.hangs.cuts import Network, read_network

LONGEST_CAUSE = 4000
"""Characters of a cause: far above the longest message with its remedy, which is at its end."""


@dataclass(frozen=True)
class Started:
    """started.json, written first by job.sh: submission and link of this attempt, and job.sh's process identity."""

    submission: int | None
    job_id: str | None
    host: str | None
    pid: int | None
    pid_start_time: int | None
    boot_id: str | None
    time: float | None
    link: int = 1
    """Place of its job in the chain of jobs of the submission."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Nodes of the job that the attempt does without, because they were at fault or do not answer -> the cause."""


@dataclass(frozen=True)
class Ending:
    """exit.json of the supervisor: exit code, reason and any signal received. Time in seconds since 1970.

    ``cause``: the supervisor's sentence on a failure, such as the node that did not start; may be empty.

    Attributes:
        restarts: the same job begins again, as the next attempt.
        most_attempts: number of the last attempt that this may lead to.
        not_restarted: the reason why the job does not begin again although it may; else empty.
        failure_class: kind of the failure (llmctl/supervisor/restarts.py); empty without a failure.
        output_kind: kind of the cause that the output tells (llmctl/supervisor/causes/messages.py); empty without one.
        output_line: the line of the output that tells it.
        lost_steps: steps trained since the newest save; None in older records.
        lost_s: seconds since the newest save, or since the start of the attempt if none was made in it.
        passes_on: the job hands the run to its next job.
        not_chained: the reason why it does not, although the run has a chain; else empty.
    """

    code: int | None
    reason: str
    signal: str | None
    time: float | None
    cause: str = ""
    restarts: bool = False
    most_attempts: int | None = None
    not_restarted: str = ""
    failure_class: str = ""
    output_kind: str = ""
    output_line: str = ""
    lost_steps: int | None = None
    lost_s: float | None = None
    passes_on: bool = False
    not_chained: str = ""

    @property
    def is_final(self) -> bool:
        """True if this ending certainly ends the run; otherwise it goes on, or the scheduler may start the job again.

        Schedulers signal a job before they start the job again (preemption, requeue). Grid Engine also restarts a job
        that ends with 99, and holds a job that ends with 100 (qsub(1)).
        """
        if self.restarts or self.passes_on:
            return False
        if self.reason not in ("stopped", "failed"):
            return True
        return self.signal is None and self.code not in (99, 100)


@dataclass(frozen=True)
class Outcome:
    """outcome.json of global rank 0 after an orderly end: completed or stopped, with the iteration."""

    reason: str
    iteration: int | None
    time: float | None


@dataclass(frozen=True)
class SaveFacts:
    """The newest complete checkpoint of an attempt.

    Attributes:
        iteration: of the checkpoint.
        bytes: size of its files.
        blocked_s: time for which the training stood.
        written_s: time until it was complete.
    """

    iteration: int
    bytes: int
    blocked_s: float
    written_s: float


@dataclass(frozen=True)
class Heartbeat:
    """heartbeat/rank-NNNNN.json: a rank's phase and iteration at its last write. Time in seconds since 1970."""

    rank: int
    host: str
    iteration: int
    phase: str
    time: float
    pid: int | None = None
    warning: str = ""
    """A sentence on something that the run survives, such as a save that a full disk refused."""
    beside: str = ""
    """Work beside that of the phase, such as a build."""
    peak_memory_bytes: int | None = None
    """The most memory that the rank has used so far."""
    written: float | None = None
    """The last sign of life of the process itself; None in heartbeats of older versions."""
    first_iteration: int | None = None
    """The iteration from which this attempt trains on; None before."""
    groups: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Name of a process group -> its first rank, and the number of the last collective that the rank has entered."""
    inside: str = ""
    """Name of the collective that the rank is in; empty outside of any."""
    group: str = ""
    """Name of the group of that collective."""
    save: SaveFacts | None = None
    """The newest complete checkpoint of this attempt."""
    stage: int | None = None
    """Stage of the pipeline: ranks of one stage have the same work."""
    busy: tuple[float, ...] = ()
    """Shares of the newest windows of 30 s in which the rank did not wait for others, the oldest first."""
    network: Network = field(default_factory=Network)
    """Connections of a rank that waits in a collective, and the peers that do not answer."""


@dataclass(frozen=True)
class RankError:
    """errors/rank-NNNNN.json: the exception that ended a rank."""

    rank: int
    coordinates: str
    host: str
    iteration: int | None
    type: str
    message: str
    time: float
    traceback: str = ""
    consequence: bool = False
    """True if the rank itself reported its error as the consequence of another rank's failure."""
    module: str = ""
    """Module of the exception's class."""

    def summary(self) -> str:
        """``rank 3 (pp 1, dp 0, tp 1) on node7: RuntimeError: first line of the message``.

        An error of the trainer's own is a sentence for the user: the whole message, without the name of its class.
        """
        where = f" ({self.coordinates})" if self.coordinates else ""
        # gloo messages begin with a source location: "[/.../pair.cc:553] Connection closed by peer".
        message = re.sub(r"^\[[^\]]*:\d+\] ", "", self.message)
        if message and (self.is_own or self.consequence):
            what = _one_line(message)
        else:
            what = _first_line(f"{self.type}: {message}" if message else self.type)
        return f"rank {self.rank}{where} on {self.host}: {what}"

    @property
    def is_own(self) -> bool:
        """True if the trainer raised the error itself, with a message for its user."""
        return self.module.partition(".")[0] == "trainer"

    @property
    def is_about_a_peer(self) -> bool:
        """True if the error is a peer failure, by the rank's flag or gloo's or NCCL's words."""
        words = (
            "connection closed by peer",
            "connection reset by peer",
            "broken pipe",
            "remote process exited",
            "connection was likely closed",
        )
        return self.consequence or any(word in self.message.lower() for word in words)


@dataclass(frozen=True)
class AttemptFacts:
    """One attempts/K directory.

    ``errors`` in order of time: the first rank to fail comes first. ``hosts``: the hosts of the hostfile.
    ``heartbeats_age_s``: age of the heartbeat read itself, at the time of observation. ``alive``: time of the
    supervisor's last sign of life, which dates an end without exit.json.
    """

    number: int
    started: Started | None = None
    ending: Ending | None = None
    outcome: Outcome | None = None
    cancel_marked: bool = False
    heartbeats: tuple[Heartbeat, ...] = ()
    heartbeats_age_s: float = 0.0
    alive: float | None = None
    errors: tuple[RankError, ...] = ()
    hosts: tuple[str, ...] = ()

    @property
    def newest_heartbeat(self) -> Heartbeat | None:
        """The latest heartbeat of any rank."""
        return max(self.heartbeats, key=lambda heartbeat: heartbeat.time, default=None)


def parse_started(data: bytes | None) -> Started | None:
    """Parse started.json; None if unreadable."""
    values = mapping_of(data)
    if values is None:
        return None
    return Started(
        submission=int_of(values, "submission"),
        job_id=text_of(values, "job_id") or None,
        host=text_of(values, "host") or None,
        pid=int_of(values, "pid"),
        pid_start_time=int_of(values, "pid_start_time"),
        boot_id=text_of(values, "boot_id") or None,
        time=float_of(values, "time"),
        link=int_of(values, "link") or 1,
        left_out=_texts(values.get("left_out")),
    )


def _texts(value: Any) -> dict[str, str]:
    found = value.items() if isinstance(value, dict) else ()
    return {name: _first_line(text) for name, text in found if isinstance(text, str)}


def parse_ending(data: bytes | None) -> Ending | None:
    """Parse exit.json; None if unreadable or without a reason."""
    values = mapping_of(data)
    if values is None or not text_of(values, "reason"):
        return None
    said = values.get("output")
    output = said if isinstance(said, dict) else {}
    return Ending(
        int_of(values, "code"),
        text_of(values, "reason"),
        text_of(values, "signal") or None,
        float_of(values, "time"),
        _first_line(text_of(values, "cause")),
        restarts=values.get("restarts") is True,
        most_attempts=int_of(values, "most_attempts"),
        not_restarted=_first_line(text_of(values, "not_restarted")),
        failure_class=text_of(values, "class"),
        output_kind=text_of(output, "kind"),
        output_line=_first_line(text_of(output, "line")),
        lost_steps=int_of(values, "lost_steps"),
        lost_s=float_of(values, "lost_s"),
        passes_on=values.get("passes_on") is True,
        not_chained=_first_line(text_of(values, "not_chained")),
    )


def parse_outcome(data: bytes | None) -> Outcome | None:
    """Parse outcome.json; None if unreadable or without a reason."""
    values = mapping_of(data)
    if values is None or not text_of(values, "reason"):
        return None
    return Outcome(text_of(values, "reason"), int_of(values, "iteration"), float_of(values, "time"))


def parse_hostfile(data: bytes | None) -> tuple[str, ...]:
    """Distinct hosts of an attempt's hostfile; empty for agents of one machine, listed as 127.0.0.1."""
    lines = (data or b"").decode("utf-8", errors="replace").splitlines()
    names = dict.fromkeys(line.split()[0] for line in lines if line.strip() and not line.startswith("#"))
    return tuple(name for name in names if not name.startswith("127."))


def parse_heartbeat(data: bytes | None) -> Heartbeat | None:
    """Parse one heartbeat; None if unreadable or without rank or time."""
    values = mapping_of(data)
    rank, time = (int_of(values, "rank"), float_of(values, "time")) if values else (None, None)
    if values is None or rank is None or time is None:
        return None
    inside = values.get("inside")
    inside = inside if isinstance(inside, dict) else {}
    return Heartbeat(
        rank,
        text_of(values, "host"),
        int_of(values, "iteration") or 0,
        text_of(values, "phase"),
        time,
        int_of(values, "pid"),
        text_of(values, "warning"),
        text_of(values, "beside"),
        int_of(values, "peak_memory_bytes"),
        float_of(values, "written"),
        int_of(values, "first_iteration"),
        _groups(values.get("groups")),
        text_of(inside, "name"),
        text_of(inside, "group"),
        _save(values),
        int_of(values, "stage"),
        _shares(values.get("busy")),
        read_network(values.get("network")),
    )


def _shares(value: Any) -> tuple[float, ...]:
    return tuple(float(share) for share in value if isinstance(share, int | float)) if isinstance(value, list) else ()


def _groups(value: Any) -> dict[str, tuple[int, int]]:
    """Name of a group -> its first rank, and the number of the last collective; without unreadable entries."""
    groups = {}
    for name, entered in value.items() if isinstance(value, dict) else ():
        if isinstance(entered, list) and len(entered) == 2 and all(type(number) is int for number in entered):
            groups[name] = (entered[0], entered[1])
    return groups


def _save(values: Mapping[str, Any]) -> SaveFacts | None:
    found = values.get("save")
    if not isinstance(found, dict):
        return None
    iteration, size = int_of(found, "iteration"), int_of(found, "bytes")
    blocked, written = float_of(found, "blocked_s"), float_of(found, "written_s")
    if iteration is None or size is None or blocked is None or written is None:
        return None
    return SaveFacts(iteration, size, blocked, written)


def parse_alive(data: bytes | None) -> float | None:
    """Parse alive.json, the supervisor's sign of life: seconds since 1970; None if unreadable."""
    values = mapping_of(data)
    return float_of(values, "time") if values is not None else None


def parse_error(data: bytes | None) -> RankError | None:
    """Parse one rank's error; None if unreadable or without a rank."""
    values = mapping_of(data)
    rank = int_of(values, "rank") if values else None
    if values is None or rank is None:
        return None
    return RankError(
        rank,
        _coordinates(values.get("coordinates")),
        text_of(values, "host") or "an unknown host",
        int_of(values, "iteration"),
        text_of(values, "type") or "error",
        text_of(values, "message"),
        float_of(values, "time") or 0.0,
        text_of(values, "traceback"),
        values.get("consequence") is True,
        text_of(values, "module"),
    )


def first_error(errors: tuple[RankError, ...]) -> RankError | None:
    """The cause among ``errors``: the earliest that is not a peer failure, else the earliest."""
    ordered = sorted(errors, key=lambda error: (error.is_about_a_peer, error.time, error.rank))
    return ordered[0] if ordered else None


def _coordinates(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{axis} {index}" for axis, index in value.items())
    text = value if isinstance(value, str) else ""
    # ParallelMesh.describe writes "rank 5 (pp 1, dp 0, tp 1)", so the rank is already named.
    inner = text[text.find("(") + 1 : text.rfind(")")] if "(" in text else text
    return " ".join(inner.split())


def _first_line(text: str) -> str:
    return _cut(next((line.strip() for line in text.splitlines() if line.strip()), ""))


def _one_line(text: str) -> str:
    """The lines of a message in one, divided by semicolons where they end without a sign."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    parts = [line if line[-1] in ".,:;" or line is lines[-1] else f"{line};" for line in lines]
    return _cut(" ".join(parts))


def _cut(line: str) -> str:
    return line if len(line) <= LONGEST_CAUSE else f"{line[:LONGEST_CAUSE]}..."

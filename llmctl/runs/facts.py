"""What the files of a run directory say, as values. Pure: bytes in, facts out.

Nothing here fails on a file that is missing, half written or of another version: what cannot be read is None, and the
decision about the run (llmctl.runs.state) is made from what is left.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Started:
    """started.json, written by job.sh as its first act: which submission this attempt belongs to, and who runs it."""

    submission: int | None
    job_id: str | None
    host: str | None
    pid: int | None
    pid_start_time: int | None
    boot_id: str | None
    time: float | None


@dataclass(frozen=True)
class Ending:
    """exit.json of the supervisor: the exit code, reason and the signal it got, if any. Time in seconds since 1970."""

    code: int | None
    reason: str
    signal: str | None
    time: float | None

    @property
    def is_final(self) -> bool:
        """Whether it is the run's end for certain; otherwise the scheduler may start the job again.

        Schedulers stop a job by a signal before they start it again (preemption, requeue). Grid Engine also starts one
        again that ends with 99, and holds one that ends with 100 (qsub(1)).
        """
        if self.reason not in ("stopped", "failed"):
            return True
        return self.signal is None and self.code not in (99, 100)


@dataclass(frozen=True)
class Outcome:
    """outcome.json of global rank 0, left in good order: completed or stopped, at which iteration."""

    reason: str
    iteration: int | None
    time: float | None


@dataclass(frozen=True)
class Heartbeat:
    """heartbeat/rank-NNNNN.json: where a rank was when it last wrote. Time in seconds since 1970."""

    rank: int
    host: str
    iteration: int
    phase: str
    time: float
    pid: int | None = None


@dataclass(frozen=True)
class RankError:
    """errors/rank-NNNNN.json: what a rank died of."""

    rank: int
    coordinates: str
    host: str
    iteration: int | None
    type: str
    message: str
    time: float
    traceback: str = ""
    consequence: bool = False
    """By its own word."""

    def summary(self) -> str:
        """``rank 3 (pp 1, dp 0, tp 1) on node7: RuntimeError: first line of the message``."""
        where = f" ({self.coordinates})" if self.coordinates else ""
        # gloo begins with the place in its own source: "[/.../pair.cc:553] Connection closed by peer".
        message = re.sub(r"^\[[^\]]*:\d+\] ", "", self.message)
        what = f"{self.type}: {message}" if message else self.type
        return f"rank {self.rank}{where} on {self.host}: {_first_line(what)}"

    @property
    def is_about_a_peer(self) -> bool:
        """Whether the rank only noticed that another had gone: by its own word, or as gloo and NCCL word it."""
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

    ``errors`` in order of time: the first is the first to have failed. ``hosts``: those of its hostfile.
    ``heartbeats_age_s``: how long before this look the heartbeats were read.
    """

    number: int
    started: Started | None = None
    ending: Ending | None = None
    outcome: Outcome | None = None
    cancel_marked: bool = False
    heartbeats: tuple[Heartbeat, ...] = ()
    heartbeats_age_s: float = 0.0
    errors: tuple[RankError, ...] = ()
    hosts: tuple[str, ...] = ()

    @property
    def newest_heartbeat(self) -> Heartbeat | None:
        """The latest sign of life of any rank."""
        return max(self.heartbeats, key=lambda heartbeat: heartbeat.time, default=None)


def parse_started(data: bytes | None) -> Started | None:
    """started.json, or None if it cannot be read."""
    values = _mapping(data)
    if values is None:
        return None
    return Started(
        submission=_int(values, "submission"),
        job_id=_text(values, "job_id") or None,
        host=_text(values, "host") or None,
        pid=_int(values, "pid"),
        pid_start_time=_int(values, "pid_start_time"),
        boot_id=_text(values, "boot_id") or None,
        time=_float(values, "time"),
    )


def parse_ending(data: bytes | None) -> Ending | None:
    """exit.json, or None if it cannot be read or gives no reason."""
    values = _mapping(data)
    if values is None or not _text(values, "reason"):
        return None
    return Ending(
        _int(values, "code"), _text(values, "reason"), _text(values, "signal") or None, _float(values, "time")
    )


def parse_outcome(data: bytes | None) -> Outcome | None:
    """outcome.json, or None if it cannot be read or gives no reason."""
    values = _mapping(data)
    if values is None or not _text(values, "reason"):
        return None
    return Outcome(_text(values, "reason"), _int(values, "iteration"), _float(values, "time"))


def parse_hostfile(data: bytes | None) -> tuple[str, ...]:
    """The hosts of an attempt's hostfile, each once; none for agents of one machine, which it calls 127.0.0.1."""
    lines = (data or b"").decode("utf-8", errors="replace").splitlines()
    names = dict.fromkeys(line.split()[0] for line in lines if line.strip() and not line.startswith("#"))
    return tuple(name for name in names if not name.startswith("127."))


def parse_heartbeat(data: bytes | None) -> Heartbeat | None:
    """One heartbeat, or None if it cannot be read or lacks rank or time."""
    values = _mapping(data)
    rank, time = (_int(values, "rank"), _float(values, "time")) if values else (None, None)
    if values is None or rank is None or time is None:
        return None
    iteration, phase = _int(values, "iteration") or 0, _text(values, "phase")
    return Heartbeat(rank, _text(values, "host"), iteration, phase, time, _int(values, "pid"))


def parse_error(data: bytes | None) -> RankError | None:
    """One rank's error, or None if it cannot be read or lacks the rank."""
    values = _mapping(data)
    rank = _int(values, "rank") if values else None
    if values is None or rank is None:
        return None
    return RankError(
        rank,
        _coordinates(values.get("coordinates")),
        _text(values, "host") or "an unknown host",
        _int(values, "iteration"),
        _text(values, "type") or "error",
        _text(values, "message"),
        _float(values, "time") or 0.0,
        _text(values, "traceback"),
        values.get("consequence") is True,
    )


def first_error(errors: tuple[RankError, ...]) -> RankError | None:
    """The cause among ``errors``: the earliest that is not merely about a peer that had gone, else the earliest."""
    ordered = sorted(errors, key=lambda error: (error.is_about_a_peer, error.time, error.rank))
    return ordered[0] if ordered else None


def _coordinates(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{axis} {index}" for axis, index in value.items())
    text = value if isinstance(value, str) else ""
    # ParallelMesh.describe writes "rank 5 (pp 1, dp 0, tp 1)": the rank is named already.
    inner = text[text.find("(") + 1 : text.rfind(")")] if "(" in text else text
    return " ".join(inner.split())


def _first_line(text: str, limit: int = 200) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= limit else f"{line[:limit]}..."


def _mapping(data: bytes | None) -> Mapping[str, Any] | None:
    if data is None:
        return None
    try:
        values = json.loads(data)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    return str(value) if isinstance(value, str | int) else ""


def _int(values: Mapping[str, Any], key: str) -> int | None:
    value = values.get(key)
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _float(values: Mapping[str, Any], key: str) -> float | None:
    value = values.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

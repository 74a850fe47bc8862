"""Class of a failure, and the decision to begin again in the same job. Pure, but for the readers of the facts."""

import json
import os
import signal
import time
from contextlib import suppress
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .causes.output import find_cause
from .causes.starts import NO_EXEC
from .ends import PartEnd
from .settings import JobSettings

KILLED, LOST_PEER, HANG, NODE = "killed", "lost_peer", "hang", "node"
NOT_FINITE, OUT_OF_MEMORY, ERROR, UNKNOWN = "not_finite", "out_of_memory", "error", "unknown"
ROLL_BACK = "roll_back"
UNSTARTED = "unstarted"
"""Key of exit.json: nodes that could not start the program while others did, with the cause."""
CONFIG, DISK, SPIKE = "config", "disk", "spike"
NEVER = {
    CONFIG: "a new attempt would meet the same error of the config",
    DISK: "the disk is full, or a quota is used up",
    SPIKE: "a new attempt would meet the same samples with the same weights",
}
"""Classes that no new attempt can help, with the reason."""
LEAST_LEFT_S = 60.0
"""Less time before the job's limit is not worth a new start."""
MOST_FRUITLESS = 2
"""Attempts in a row without a new step that are a crash loop."""

_BAD_CONFIG = (2, 3)
"""Exit codes of the trainer for bad flags and a bad config (trainer/commands/pretrain.py)."""
_OF_SIGNALS = 128
_BY_LAUNCHER = _OF_SIGNALS + int(signal.SIGTERM)
"""A launcher ends the parts that are left by SIGTERM."""
_CLASSES_OF_TYPE = {"NonFiniteError": NOT_FINITE, "LossSpikeError": SPIKE, "RollBackError": ROLL_BACK}
"""Type of a rank's own error (trainer/training/soundness) -> class."""
_CLASSES_OF_ERROR = {
    "gpu_memory": OUT_OF_MEMORY,
    "host_memory": OUT_OF_MEMORY,
    "disk_full": DISK,
    "quota": DISK,
    "gpu_hardware": NODE,
}
"""Kind of a cause (causes/messages.py) in the message of a rank's own error -> class."""
_CLASSES_OF_OUTPUT = {
    **_CLASSES_OF_ERROR,
    "host_memory_killed": OUT_OF_MEMORY,
    "not_finite": NOT_FINITE,
    "communication": LOST_PEER,
    "node": NODE,
    "usage": CONFIG,
    "no_program": CONFIG,
}
"""Kind of a cause in an output -> class, where the exit code tells less."""
_TAIL_BYTES = 65536
_NOBODY: Mapping[str, str] = {}


class RankFailure(NamedTuple):
    """One errors/rank-NNNNN.json: class and words of the exception, and True if another rank is the cause.

    Attributes:
        culprits: names of the nodes that the preflight has found unfit; empty for any other error.
        rank: number of the rank; -1 if the name of the file tells none.
    """

    type: str
    message: str
    consequence: bool
    exit_code: int
    time: float
    culprits: Tuple[str, ...] = ()
    rank: int = -1


class Failure(NamedTuple):
    """Facts on a failed attempt.

    Attributes:
        code: exit code, as for exit.json.
        is_training: False for a COMMAND.
        ranks: records of the failed ranks.
        parts: ends of the parts that failed, the first one first.
        verdict: class that the watch of the attempt has given; empty without one.
        lost_node: a machine has fallen silent, or a part has not started.
        output: kind of the cause that the output tells (causes/messages.py); empty without one.
        unstarted: nodes that could not start the program while others did, each with the cause.
    """

    code: int
    is_training: bool = True
    ranks: Tuple[RankFailure, ...] = ()
    parts: Tuple[PartEnd, ...] = ()
    verdict: str = ""
    lost_node: bool = False
    output: str = ""
    unstarted: Mapping[str, str] = _NOBODY


class Reached(NamedTuple):
    """Newest trained and newest saved iteration of the run at the end of an attempt."""

    attempt: int
    trained: int
    saved: int


class History(NamedTuple):
    """Attempts of the run up to the one that has just failed.

    Attributes:
        reached: of each attempt, the oldest first; the last one is the failed attempt.
        restarts: how often this submission has begun again so far.
    """

    reached: Tuple[Reached, ...]
    restarts: int


def class_of(failure: Failure) -> str:
    """Class of a failure: by the watch, then nodes without the program, a rank's own error, and what was killed."""
    if failure.verdict or failure.unstarted:
        return failure.verdict or NODE
    own = sorted((rank for rank in failure.ranks if not rank.consequence), key=lambda rank: rank.time)
    if own:
        return _class_of_error(own[0])
    if failure.output in _CLASSES_OF_OUTPUT:
        return _CLASSES_OF_OUTPUT[failure.output]
    if any(part.started is False and part.code in NO_EXEC for part in failure.parts[:1]):
        return CONFIG
    codes = (failure.code, *(part.signal and _OF_SIGNALS + part.signal for part in failure.parts[:1]))
    if any(_OF_SIGNALS < code < _OF_SIGNALS + 65 and code != _BY_LAUNCHER for code in codes):
        return KILLED
    if failure.lost_node:
        return NODE
    if failure.ranks:
        return LOST_PEER
    if _BY_LAUNCHER in codes:
        return KILLED
    if failure.is_training and failure.code in _BAD_CONFIG:
        return CONFIG
    return UNKNOWN if failure.is_training else ERROR


def culprits_of(failure: Failure) -> Dict[str, List[str]]:
    """``culprits`` of exit.json: the nodes at fault, by their start or the first rank's own error; or empty."""
    if failure.unstarted and not failure.verdict:
        return {"culprits": list(failure.unstarted)}
    own = sorted((rank for rank in failure.ranks if not rank.consequence), key=lambda rank: rank.time)
    is_named = bool(own) and bool(own[0].culprits) and class_of(failure) == NODE
    return {"culprits": list(own[0].culprits)} if is_named else {}


def _class_of_error(rank: RankFailure) -> str:
    if rank.culprits:
        return NODE
    if rank.exit_code in _BAD_CONFIG:
        return CONFIG
    if rank.type in _CLASSES_OF_TYPE:
        return _CLASSES_OF_TYPE[rank.type]
    cause = find_cause(f"{rank.type}: {rank.message}")
    return _CLASSES_OF_ERROR.get(cause.kind, ERROR) if cause is not None else ERROR


def refusal(job: JobSettings, failure_class: str, history: History, left_s: Optional[float]) -> str:
    """The reason why a failed attempt is the last one; empty if the run begins again.

    Args:
        job: settings, with max_restarts above 0.
        failure_class: of the failed attempt.
        history: the attempts up to this one.
        left_s: seconds until the run is asked to stop at its time limit; None without a limit.
    """
    if failure_class in NEVER:
        return NEVER[failure_class]
    if failure_class not in job.restart_on:
        return f"{failure_class} is not one of job.restart_on ({', '.join(job.restart_on)})"
    loop = crash_loop(history.reached) if job.is_training else ""
    if loop:
        return loop
    if history.restarts >= job.max_restarts:
        return f"job.max_restarts {job.max_restarts} is used up"
    if left_s is not None and left_s < LEAST_LEFT_S:
        return f"{max(0.0, left_s):.0f} s are left before the time limit"
    return ""


def crash_loop(reached: Sequence[Reached]) -> str:
    """Sentence on the last attempts if none of them has made a new step; empty otherwise."""
    fruitless = fruitless_attempts(reached)
    if len(fruitless) < MOST_FRUITLESS:
        return ""
    best = max(one.trained for one in reached)
    numbers = " and ".join(str(attempt) for attempt in fruitless[-MOST_FRUITLESS:])
    return f"attempts {numbers} have trained and saved nothing beyond iteration {best}"


def fruitless_attempts(reached: Sequence[Reached]) -> Tuple[int, ...]:
    """Numbers of the last attempts in a row that have neither trained nor saved a step that an earlier one had not."""
    best = Reached(0, 0, 0)
    fruitless: List[int] = []
    for one in reached:
        if one.trained > best.trained or one.saved > best.saved:
            fruitless = []
        else:
            fruitless.append(one.attempt)
        best = Reached(0, max(best.trained, one.trained), max(best.saved, one.saved))
    return tuple(fruitless)


def read_rank_failures(folder: str) -> Tuple[RankFailure, ...]:
    """Records of the failed ranks of an attempt; a half-written one is left out."""
    found = []
    names: List[str] = []
    with suppress(OSError):
        names = sorted(os.listdir(f"{folder}/errors"))
    for file_name in names:
        values = read_object(f"{folder}/errors/{file_name}")
        with suppress(ValueError, KeyError, TypeError):
            consequence, when, code = bool(values["consequence"]), float(values["time"]), int(values["exit_code"])
            words = str(values.get("type", "")), str(values.get("message", ""))
            named = values.get("culprits")
            culprits = tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()
            found.append(RankFailure(*words, consequence, code, when, culprits, _rank_of(file_name)))
    return tuple(found)


def _rank_of(file_name: str) -> int:
    number = file_name[len("rank-") : -len(".json")]
    return int(number) if number.isdigit() else -1


def read_reached(run_dir: str, attempt: int) -> Reached:
    """Read the progress of the run at the end of an attempt.

    The trained iteration is that of the last rows of metrics.jsonl and of the attempt's heartbeats: a row may stand for
    many iterations.
    """
    trained = 0
    folder = f"{run_dir}/attempts/{attempt}/heartbeat"
    names: List[str] = []
    with suppress(OSError):
        names = os.listdir(folder)
    for values in [*(read_object(f"{folder}/{name}") for name in names), *last_rows(f"{run_dir}/metrics.jsonl")]:
        trained = max(trained, _iteration(values))
    return Reached(attempt, trained, _iteration(read_object(f"{run_dir}/saved.json")))


def seconds_since_save(run_dir: str, folder: str) -> float:
    """Seconds since the newest save, or since the start of the attempt in this folder if it has made none.

    The two times of files are a file server's, the present one is this node's.
    """
    times = []
    for path in (f"{run_dir}/saved.json", f"{folder}/started.json"):
        with suppress(OSError):
            times.append(os.stat(path).st_mtime)
    return max(0.0, time.time() - max(times)) if times else 0.0


def read_history(job: JobSettings, ended: Reached, job_id: str = "") -> History:
    """The attempts up to one that has just ended, by the exit.json of the earlier ones.

    Args:
        job: settings.
        ended: progress at the end of the last one.
        job_id: count the restarts of this job alone, of all those of a chain; empty: those of the submission.
    """
    reached, restarts = [], 0
    for number in range(1, ended.attempt):
        folder = job.attempt_dir(number)
        values = read_object(f"{folder}/exit.json")
        if isinstance(values.get("trained"), int) and isinstance(values.get("saved"), int):
            reached.append(Reached(number, values["trained"], values["saved"]))
        started = read_object(f"{folder}/started.json")
        is_own = started.get("submission") == job.submission and job_id in ("", started.get("job_id"))
        restarts += is_own and values.get("restarts") is True
    return History((*reached, ended), restarts)


def last_rows(path: str) -> List[Dict[str, Any]]:
    """The last rows of metrics.jsonl, the oldest first; empty without the file."""
    rows = []
    with suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        for line in file.read().splitlines():
            with suppress(ValueError):
                row = json.loads(line.decode(errors="replace"))
                if isinstance(row, dict):
                    rows.append(row)
    return rows


def _iteration(values: Dict[str, Any]) -> int:
    found = values.get("iteration")
    return found if isinstance(found, int) else 0


def read_object(path: str) -> Dict[str, Any]:
    """The object in a JSON file; empty if the file is missing or half-written."""
    with suppress(OSError, ValueError):
        with open(path, encoding="utf-8", errors="replace") as file:
            values = json.loads(file.read())
        if isinstance(values, dict):
            return values
    return {}

"""Ends of the parts of an attempt: each node, or each rank that a launcher starts, records its end.

A launcher may report success although it has started nothing: srun of Slurm 22.05 exits with 0 when a plugin of the
site fails on every node. So the head node believes in success only if every part has recorded it.
"""

import json
import os
import socket
import time
from contextlib import suppress
from typing import Any, Dict, List, NamedTuple, Optional

from .attempt import Attempt, outcome_of_rank_0
from .settings import JobSettings

VISIBLE_S = 20.0
"""Seconds until a file of another node must be visible on a network file system whose folder is read again."""
_NAMED = 4


class PartEnd(NamedTuple):
    """End of one part: exit code, the signal that ended the part, time, host, and True if its program has started.

    The last is None if unknown.
    """

    code: int
    signal: int
    time: float
    host: str
    started: Optional[bool] = None


def part_name(job: JobSettings, number: int) -> str:
    """Name of a part in its file: node-00002, or rank-00012 if the launcher starts each rank."""
    return f"{_kind(job)}-{number:05d}"


def write_end(attempt: Attempt, part: str, status: int, ended_at: float, started: Optional[bool]) -> None:
    """Record the end of a part.

    Args:
        attempt: of the part.
        part: its name.
        status: of ``Popen``.
        ended_at: time of the end, in seconds since 1970.
        started: of the program; None if unknown.
    """
    code, number = (128 - status, -status) if status < 0 else (status, 0)
    values: Dict[str, Any] = {"code": code, "signal": number, "time": ended_at, "host": socket.gethostname()}
    if started is not None:
        values["started"] = started
    attempt.write(f"ended-{part}.json", values)


def read_ends(folder: str) -> Dict[str, PartEnd]:
    """Ends of the parts of an attempt by name; a half-written file is left out."""
    found = {}
    names: List[str] = []
    with suppress(OSError):
        # Reading the directory makes a network file system refresh its cache.
        names = os.listdir(folder)
    for name in names:
        if name.startswith("ended-") and name.endswith(".json"):
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                path = f"{folder}/{name}"
                with open(path, encoding="utf-8", errors="replace") as file:
                    values = json.loads(file.read())
                when = float(values.get("time") or os.path.getmtime(path))
                started = values.get("started")
                end = PartEnd(
                    int(values["code"]),
                    int(values.get("signal") or 0),
                    when,
                    str(values.get("host", "")),
                    started if isinstance(started, bool) else None,
                )
                found[name[len("ended-") : -len(".json")]] = end
    return found


def doubt_about_success(job: JobSettings, attempt: Attempt, node: int) -> str:
    """Sentence on a part that did not succeed although the launcher says so; empty if all parts did.

    Args:
        job: settings.
        attempt: of the launcher.
        node: this node; 0 answers for all nodes whose files are visible here.
    """
    numbers = range(job.nodes * (job.ranks_per_node if job.one_process_per_rank else 1))
    if job.hosts and (node > 0 or not job.shared):
        numbers = range(node, node + 1)
    parts = [part_name(job, number) for number in numbers]
    has_rank_0 = job.is_training and node == 0
    deadline = time.monotonic() + VISIBLE_S
    while True:
        ends = read_ends(attempt.folder)
        is_told = not has_rank_0 or bool(outcome_of_rank_0(attempt.folder))
        if (is_told and all(part in ends for part in parts)) or time.monotonic() >= deadline:
            break
        time.sleep(0.5)
    doubt = _doubt(job, attempt, parts, ends)
    if not doubt and not is_told:
        doubt = "rank 0 did not record an end of the training"
    return doubt


def _doubt(job: JobSettings, attempt: Attempt, parts: List[str], ends: Dict[str, PartEnd]) -> str:
    missing = [part for part in parts if part not in ends]
    logs: List[str] = []
    with suppress(OSError):
        logs = os.listdir(attempt.folder)
    unstarted = [part for part in missing if f"node-{_node_of(job, part):05d}.log" not in logs]
    if len(unstarted) == len(parts):
        return f"no {_kind(job)} started its part"
    failed = [part for part in parts if part in ends and ends[part].code != 0]
    if unstarted:
        return f"{_names(job, attempt, unstarted)} did not start"
    if missing:
        return f"{_names(job, attempt, missing)} did not record an end"
    if failed:
        return f"{_names(job, attempt, failed)} failed with exit code {ends[failed[0]].code}"
    return ""


def _names(job: JobSettings, attempt: Attempt, parts: List[str]) -> str:
    hosts: List[str] = []
    with suppress(OSError), open(f"{attempt.folder}/hostfile", errors="replace") as file:
        hosts = [line.split()[0] for line in file if line.strip()]
    words = []
    for part in parts[:_NAMED]:
        node = _node_of(job, part)
        host = hosts[node] if node < len(hosts) else ""
        words.append(f"{_kind(job)} {int(part[-5:])}" + (f" on {host}" if host and not host.startswith("127.") else ""))
    more = len(parts) - len(words)
    return ", ".join(words) + (f" and {more} more" if more else "")


def _node_of(job: JobSettings, part: str) -> int:
    return int(part[-5:]) // (job.ranks_per_node if job.one_process_per_rank else 1)


def _kind(job: JobSettings) -> str:
    return "rank" if job.one_process_per_rank else "node"

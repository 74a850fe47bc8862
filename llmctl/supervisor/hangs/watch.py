"""Watch for a hang of the ranks, on the head node, by their heartbeat files and this process's own clock alone.

A content that has not changed for a time is a silence of that time: no other host's clock counts. Rank 0 is looked at
each second, and the others only while rank 0 makes no progress, for they all wait for each other within a step.
"""

import json
import os
from contextlib import suppress
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from ..restarts import last_rows
from ..settings import JobSettings
from .cuts import read_network
from .waiting import Hang, Point, find_hang, find_standstill

LOOK_S = 1.0
"""Seconds between two looks at rank 0, and between two looks at all of a few ranks."""
SILENT_S = 2.0
"""Silence of rank 0 after which all ranks are looked at."""
LOOK_AT_MANY_S = 5.0
"""Seconds between two looks at all of many ranks, whose files cost a file server time."""
FEW = 64
LEAST_S = 5.0
"""Seconds between the words on a hang and the end of the attempt, at the least: the ranks write their stacks."""
NOTICE_S = 60.0
"""Length of a hang of which people are told: a file server's pause is shorter."""
_MOST_STEP_S = 5.0
"""Most seconds that count between two looks: a scheduler may have suspended this process and the ranks."""
_RANK_0 = "rank-00000.json"


class _Seen(NamedTuple):
    """Content of a heartbeat file, and the times at which its progress and its text were first seen."""

    text: str
    values: Dict[str, Any]
    progress: Tuple[object, ...]
    progress_since: float
    text_since: float


class HangWatch:
    """Watch of one attempt.

    Attributes:
        sentence: on the present hang; empty without one.
        ranks: for which the others wait in the present hang; empty without one, or if no rank is behind.
        is_over: True once the hang has lasted for ``job.hang_timeout_s``.
    """

    def __init__(self, job: JobSettings, folder: str) -> None:
        """Watch the attempt in this folder."""
        self.sentence = ""
        self.ranks: Tuple[int, ...] = ()
        self.is_over = False
        self._run_dir = job.run_dir
        self._timeout_s = job.hang_timeout_s
        self._folder = f"{folder}/heartbeat"
        self._seen: Dict[str, _Seen] = {}
        self._clock = self._next = self._next_all = self._began = self._longest_s = 0.0
        self._polled: Optional[float] = None
        self._is_noticed = False

    def poll(self, now: float) -> bool:
        """Look if a look is due; returns True if a hang has begun.

        Args:
            now: monotonic time in seconds.
        """
        if self._polled is not None:
            self._clock += min(now - self._polled, _MOST_STEP_S)
        self._polled = now
        if self._clock < self._next:
            return False
        self._next = self._clock + LOOK_S
        self._read(_RANK_0)
        first = self._seen.get(_RANK_0)
        if first is None or self._clock - first.progress_since < SILENT_S:
            self._note(None)
            return False
        if self._clock < self._next_all:
            return False
        names = self._names()
        self._next_all = self._clock + (LOOK_S if len(names) <= FEW else LOOK_AT_MANY_S)
        for name in names:
            self._read(name)
        return self._note(self._find())

    def notice(self) -> str:
        """Words on a hang that people should know of, once; else empty.

        A run that once went on after a long hang gets three times as long.
        """
        if not self.sentence or self._is_noticed:
            return ""
        if not self.is_over and self._clock - self._began < max(NOTICE_S, 3 * self._longest_s):
            return ""
        self._is_noticed = True
        return f"hangs: {self.sentence}"

    def _note(self, hang: Optional[Hang]) -> bool:
        if hang is None:
            if self.sentence:
                self._longest_s = max(self._longest_s, self._clock - self._began)
            self.sentence = ""
            return False
        is_new = not self.sentence
        if is_new:
            self._began, self._is_noticed = self._clock, False
        self.sentence, self.ranks = hang.sentence, hang.causes
        if self._timeout_s:
            self.is_over = self._clock - self._began >= max(self._timeout_s, LEAST_S)
        return is_new

    def _find(self) -> Optional[Hang]:
        points = [point for point in map(self._point, self._seen.values()) if point is not None]
        times = [row.get("iteration_time_s") for row in last_rows(f"{self._run_dir}/metrics.jsonl")]
        known = sorted(float(time) for time in times if isinstance(time, (int, float)))
        iteration_time_s = known[len(known) // 2] if known else None
        return find_hang(points, iteration_time_s) or find_standstill(points, iteration_time_s)

    def _names(self) -> List[str]:
        with suppress(OSError):
            return [name for name in os.listdir(self._folder) if name.startswith("rank-") and name.endswith(".json")]
        return []

    def _read(self, name: str) -> None:
        with suppress(OSError, ValueError):
            with open(f"{self._folder}/{name}", encoding="utf-8", errors="replace") as file:
                text = file.read()
            before = self._seen.get(name)
            if before is not None and before.text == text:
                return
            values = json.loads(text)
            if not isinstance(values, dict):
                return
            progress = tuple(str(values.get(key)) for key in ("time", "iteration", "phase", "groups"))
            since = self._clock
            if before is not None and before.progress == progress:
                since = before.progress_since
            self._seen[name] = _Seen(text, values, progress, since, self._clock)

    def _point(self, seen: _Seen) -> Optional[Point]:
        values = seen.values
        with suppress(KeyError, TypeError, ValueError):
            inside = values.get("inside") or {}
            iteration, first = int(values["iteration"]), values.get("first_iteration")
            return Point(
                rank=int(values["rank"]),
                host=str(values["host"]),
                iteration=iteration,
                phase=str(values["phase"]),
                silent_s=self._clock - seen.progress_since,
                unwritten_s=self._clock - seen.text_since,
                groups={name: (int(one[0]), int(one[1])) for name, one in (values.get("groups") or {}).items()},
                inside=str(inside.get("name", "")),
                group=str(inside.get("group", "")),
                is_first_step=first is not None and iteration <= int(first),
                network=read_network(values.get("network")),
            )
        return None

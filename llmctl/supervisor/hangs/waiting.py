"""Ranks that wait for each other, decided from their heartbeats alone: the rank that does not come. Pure.

All members of a group enter the same collectives in the same order. A member with a larger number of entered
collectives waits for those with the smallest; a member that is inside a message of the pipeline may wait for any other
stage. A rank that waits for nobody, and that somebody waits for, is a cause: the others are its victims. Nodes that the
network has cut off are told first: there every rank may wait (cuts.py).
"""

from typing import Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from .cuts import Cut, Network, Side, find_cut
from .names import MOST_NAMED, rank_words

STEP_S = 8.0
"""Patience with a rank in a step, beside the time of an iteration: heartbeats are written once a second."""
FIRST_STEP_S = 120.0
"""The same in the first step of an attempt, which may compile kernels and open connections."""
STEP_SHARE = 1.25
"""Iterations' time of patience in a step. A step communicates several times, and each time is progress."""
_PATIENCE_S = {
    "data": 60.0,
    "logging": 60.0,
    "hooks": 300.0,
    "evaluation": 1800.0,
    "checkpoint": 1800.0,
    "export": 3600.0,
    "profile": 1800.0,
    "switching the kernels": 300.0,
}
"""Patience with phases that may be long without a collective. Reads, writes and user's code have no known time."""
_STEP_PHASES = ("forward and backward", "optimizer", "agreement")
_START_S = 1800.0
"""Patience with any other phase: the start loads libraries, kernels and checkpoints from file systems."""
SIGN_S = 5.0
"""Seconds between the signs of life of a rank (trainer/process/heartbeat.py)."""
UNWRITTEN_S = 8.0
"""Age of the sign of life above which a process that others wait for is stopped."""
STOPPED_S = 60.0
"""The same in a phase in which all ranks use the file system at once, which delays the signs of a living rank."""
_BETWEEN_STEPS = ("data", "logging", "hooks")
"""Phases of each iteration. While the file system keeps all ranks waiting, none of them waits for another one."""
STANDSTILL_S = 30.0
"""Silence of all ranks that is a hang at the least, where none tells that it waits."""
_ENDED = ("completed", "stopped", "failed")
_OF_MESSAGES = ("pp", "pp_up")
"""Groups whose members differ in the number of their messages."""
_BESIDE = ("save",)
"""Groups of threads beside the training, which no step waits for."""


class Point(NamedTuple):
    """The point at which a rank is.

    Attributes:
        silent_s: seconds since its last progress.
        unwritten_s: seconds since its last sign of life.
        groups: name of a group -> its first rank, and the number of the last collective that the rank has entered.
        inside: the collective that the rank is in; empty outside of any.
        group: name of that collective's group; empty if unknown.
        is_first_step: True in the first step of the attempt.
        network: connections of a rank that waits.
    """

    rank: int
    host: str
    iteration: int
    phase: str
    silent_s: float
    unwritten_s: float
    groups: Dict[str, Tuple[int, int]]
    inside: str = ""
    group: str = ""
    is_first_step: bool = False
    network: Network = Network()

    @property
    def is_stopped(self) -> bool:
        """True if the process gives no sign of life."""
        is_of_iteration = self.phase in _STEP_PHASES or self.phase in _BETWEEN_STEPS
        return self.unwritten_s > (UNWRITTEN_S if is_of_iteration else STOPPED_S)

    @property
    def has_ended(self) -> bool:
        """True if the rank has left its training. A rank that completes waits for the others at the very end."""
        return self.phase in _ENDED and not self.inside

    @property
    def name(self) -> str:
        """Rank, host, phase and iteration as text."""
        return f"rank {self.rank} on {self.host} (phase {self.phase}, iteration {self.iteration})"


class Hang(NamedTuple):
    """A hang: its ranks, and the sentence that names them.

    Attributes:
        causes: ranks that do not come, or whose node does not answer; empty if all ranks wait and none is behind.
        silent_s: seconds since the last progress.
    """

    causes: Tuple[int, ...]
    sentence: str
    silent_s: float


def find_hang(points: Sequence[Point], iteration_time_s: Optional[float]) -> Optional[Hang]:
    """The hang of ranks that wait for each other; None if no rank waits, or not for long enough.

    Args:
        points: of all ranks known, each with its groups.
        iteration_time_s: present seconds per iteration; None if unknown.
    """
    waits = _Waits(points)
    waiting = [point for point in points if waits.is_waiting(point)]
    if not waiting:
        return None
    causes = waits.causes()
    silent = [cause.silent_s for cause in causes if not cause.is_stopped] or [point.silent_s for point in waiting]
    # Also those who wait must be silent: a rank that is a moment behind, or whose file is old, stops nobody.
    silent_s = min(min(silent), max(point.silent_s for point in waiting))
    if silent_s <= max(patience_s(point, iteration_time_s) for point in causes or waiting):
        return None
    cut = _cut_of(points)
    # A rank that is behind may be a victim: the next message to it is lost.
    if cut is not None and not any(cause.is_stopped for cause in causes):
        rest = f"no progress for {silent_s:.0f} s" if causes else _mutual(waiting, len(points), silent_s).sentence
        return Hang(cut.ranks, f"{cut.sentence}; {rest}", silent_s)
    if not causes:
        return _mutual(waiting, len(points), silent_s)
    named = "; ".join(_cause(cause, waits, silent_s) for cause in causes[:MOST_NAMED])
    more = f"; and {len(causes) - MOST_NAMED} more" if len(causes) > MOST_NAMED else ""
    return Hang(tuple(cause.rank for cause in causes), named + more, silent_s)


def find_standstill(points: Sequence[Point], iteration_time_s: Optional[float]) -> Optional[Hang]:
    """The hang of ranks of which none makes progress, and none tells that it waits; None while one may go on.

    Args:
        points: of all ranks known.
        iteration_time_s: present seconds per iteration; None if unknown.
    """
    if not points or any(point.has_ended for point in points):
        return None
    silent_s = min(point.silent_s for point in points)
    if silent_s <= max(STANDSTILL_S, *(patience_s(point, iteration_time_s) for point in points)):
        return None
    earliest = min((point.iteration, -point.silent_s, point.rank) for point in points)
    first = next(point for point in points if (point.iteration, -point.silent_s, point.rank) == earliest)
    if first.is_stopped:
        words = f"is stopped, or its node does not answer: no sign of life for {first.unwritten_s:.0f} s"
        return Hang((first.rank,), f"{first.name} {words}", silent_s)
    others = "" if len(points) == 1 else f", the first of {len(points)} ranks that stand still"
    return Hang((first.rank,), f"no progress for {silent_s:.0f} s: {first.name}{others}", silent_s)


def _cut_of(points: Sequence[Point]) -> Optional[Cut]:
    # The facts of a stopped process are as old as its sign of life.
    ages = [0.0 if point.is_stopped else point.unwritten_s for point in points]
    return find_cut(
        [Side(point.rank, point.host, point.network, age, point.silent_s) for point, age in zip(points, ages)]
    )


class _Waits:
    """Who waits for whom, over the groups: linear in the number of ranks times groups."""

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = {point.rank: point for point in points}
        self.members: Dict[Tuple[str, int], List[Point]] = {}
        for point in points:
            for name, (first, _) in point.groups.items():
                self.members.setdefault((name, first), []).append(point)
        numbers = {key: [point.groups[key[0]][1] for point in members] for key, members in self.members.items()}
        self._least = {key: min(entered) for key, entered in numbers.items()}
        self._most = {key: max(entered) for key, entered in numbers.items()}

    def is_waiting(self, point: Point) -> bool:
        """True if a rank waits in a collective, or for a rank that has entered fewer."""
        if point.is_stopped or point.has_ended:
            return False
        return bool(self.awaited_groups(point)) or (bool(point.inside) and not self._is_left(point))

    def _is_left(self, point: Point) -> bool:
        """True if a rank is in a collective that the others have left, for a later one of the same or another group."""
        if point.group in _OF_MESSAGES or point.group not in point.groups:
            return False
        first, number = point.groups[point.group]
        key = (point.group, first)
        return self._most[key] > number or (self._least[key] == number and self._is_behind(point))

    def _is_behind(self, point: Point) -> bool:
        """True if other ranks wait for a rank in a collective that it has not entered."""
        keys = [(name, first) for name, (first, _) in point.groups.items() if name not in (*_OF_MESSAGES, *_BESIDE)]
        return any(point.groups[key[0]][1] == self._least[key] < self._most[key] for key in keys)

    def awaited_groups(self, point: Point) -> List[Tuple[str, int]]:
        """Groups in which a rank waits for others."""
        keys = [(name, first) for name, (first, _) in point.groups.items()]
        return [key for key in keys if self._awaits(point, key)]

    def _awaits(self, point: Point, key: Tuple[str, int]) -> bool:
        name = key[0]
        if name in _OF_MESSAGES:
            return bool(point.inside) and point.group == name
        if name in _BESIDE:
            return False
        return point.groups[name][1] > self._least[key]

    def awaited_ranks(self, key: Tuple[str, int], point: Point) -> List[Point]:
        """Members of a group that a rank waits for."""
        name = key[0]
        if name in _OF_MESSAGES:
            return [other for other in self.members[key] if other.rank != point.rank]
        return [other for other in self.members[key] if other.groups[name][1] == self._least[key]]

    def causes(self) -> List[Point]:
        """Ranks that wait for nobody, and that a waiting rank waits for, over others too; in order of rank."""
        found: Set[int] = set()
        seen: Set[Tuple[str, int]] = set()
        todo = [point for point in self._points.values() if self.is_waiting(point)]
        while todo:
            point = todo.pop()
            for key in self.awaited_groups(point):
                if key in seen:
                    continue
                if key[0] not in _OF_MESSAGES:
                    seen.add(key)
                found.update(other.rank for other in self.awaited_ranks(key, point) if not self.is_waiting(other))
        if not found:
            # A process that was stopped inside of the collective that the others wait in.
            found = {point.rank for point in self._points.values() if point.is_stopped}
        return [self._points[rank] for rank in sorted(found)]

    def victims(self, cause: Point) -> Tuple[List[Point], Optional[Tuple[str, int]]]:
        """Ranks that wait for a cause directly, and the group in which they do."""
        for key in sorted(((name, first) for name, (first, _) in cause.groups.items()), key=self._order):
            waiting = [
                point
                for point in self.members[key]
                if point.rank != cause.rank and self.is_waiting(point) and self._awaits(point, key)
            ]
            if waiting:
                return waiting, key
        return [], None

    def _order(self, key: Tuple[str, int]) -> Tuple[bool, bool, int]:
        """Groups of collectives first, and the smaller first: in the larger ones the rank's victims wait too."""
        is_inside = any(point.inside and point.group == key[0] for point in self.members[key])
        return not is_inside, key[0] in _OF_MESSAGES, len(self.members[key])


def patience_s(point: Point, iteration_time_s: Optional[float]) -> float:
    """Seconds for which a rank may be silent."""
    if point.is_stopped or point.has_ended:
        return STEP_S + STEP_SHARE * (iteration_time_s or 0.0)
    if point.phase not in _STEP_PHASES:
        return _PATIENCE_S.get(point.phase, _START_S) + STEP_SHARE * (iteration_time_s or 0.0)
    if iteration_time_s is None or point.is_first_step:
        return FIRST_STEP_S
    return STEP_S + STEP_SHARE * iteration_time_s


def _cause(cause: Point, waits: _Waits, silent_s: float) -> str:
    """Sentence on one cause and the ranks that wait for it directly."""
    victims, key = waits.victims(cause)
    who = rank_words([point.rank for point in victims]) if victims else "the other ranks"
    waiting = f"{who} {'waits' if len(victims) == 1 else 'wait'} for it"
    what = "its next message" if key is None or key[0] in _OF_MESSAGES else _collective(victims, key[0])
    if cause.has_ended:
        return f"{cause.name} has ended, and will not enter {what}: {waiting}"
    if cause.is_stopped:
        silence = f"no sign of life for {cause.unwritten_s:.0f} s"
        place = f" in {what}" if victims else ""
        return f"{cause.name} is stopped, or its node does not answer: {silence}; {waiting}{place}"
    if key is not None and key[0] in _OF_MESSAGES:
        return f"{cause.name} has not sent its next message for {silent_s:.0f} s; {waiting}"
    return f"{cause.name} has not entered {what} for {silent_s:.0f} s; {waiting}"


def _collective(victims: Sequence[Point], name: str) -> str:
    """``all_reduce 227 of dp``: the first one that ranks wait in."""
    first = min(victims, key=lambda point: point.groups[name][1])
    number = first.groups[name][1]
    words = {point.inside for point in victims if point.group == name and point.groups[name][1] == number}
    word = words.pop() if len(words) == 1 else ""
    return _words(word, number, name)


def _words(word: str, number: Optional[int], group: str) -> str:
    called = "collective" if word in ("", "wait") else word
    counted = called if number is None or group in _OF_MESSAGES else f"{called} {number}"
    return f"{counted} of {group.replace('dp_cp', 'dp x cp')}" if group else counted


def _mutual(waiting: Sequence[Point], ranks: int, silent_s: float) -> Hang:
    """The hang of ranks that all wait: in different collectives, or in one whose messages do not arrive."""
    places: Dict[str, List[Point]] = {}
    for point in waiting:
        number = point.groups[point.group][1] if point.group in point.groups else None
        places.setdefault(_words(point.inside, number, point.group), []).append(point)
    ordered = sorted(places.items(), key=lambda place: (len(place[1]), place[1][0].rank))
    if len(ordered) == 1:
        verb = "waits" if len(waiting) == 1 else "wait"
        who = "all ranks are" if len(waiting) == ranks else f"{rank_words([point.rank for point in waiting])} {verb}"
        return Hang((), f"no progress for {silent_s:.0f} s: {who} in {ordered[0][0]}", silent_s)
    is_alone = len(ordered[0][1]) < len(ordered[-1][1])
    causes = tuple(point.rank for point in ordered[0][1]) if is_alone else ()
    parts = []
    for what, points in ordered[:MOST_NAMED]:
        who = points[0].name if len(points) == 1 else rank_words([point.rank for point in points])
        parts.append(f"{who} in {what}")
    sentence = f"no progress for {silent_s:.0f} s: ranks wait for each other, {', '.join(parts)}"
    return Hang(causes, sentence, silent_s)

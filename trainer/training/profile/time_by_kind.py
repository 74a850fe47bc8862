"""Time of a step by kinds of work, from the events of a profile. Pure, torch-free.

Each moment of an iteration counts once, so that the kinds add up to the time of the iteration:

- CPU: the innermost operation of the main thread. Where that thread has none, the operation of another thread, such as
  that of a backward pass; then a collective that is under way, for which the rank waits; else Python.
- GPU: the kernel that runs, a computation before a message beside it. Without one the GPU is idle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from trainer.training.profile.kinds import COMMUNICATION, OTHER, kind_of

ITERATION = "iteration "
"""Beginning of the annotation around each iteration."""
DATA, OPTIMIZER, PYTHON, IDLE = "waiting for data", "optimizer", "Python", "idle"
_PARTS = {"data": DATA, "optimizer": OPTIMIZER}
"""Annotation of a part of a step (trainer/distributed/step_timers.py) -> kind of everything in the part."""


class Event(NamedTuple):
    """An operation, kernel or annotation.

    Attributes:
        name: of the operation.
        start: in µs since any moment.
        end: the same.
        thread: of the host; None on a GPU.
        is_annotation: True for a named part of the program.
        is_async: True if the event does not belong to the stack of its thread: a collective under way.
    """

    name: str
    start: float
    end: float
    thread: int | None
    is_annotation: bool = False
    is_async: bool = False


class Segment(NamedTuple):
    """Part of a timeline, in µs, and its kind."""

    start: float
    end: float
    kind: str


@dataclass(frozen=True)
class TimeByKind:
    """Mean time of an iteration by kind, in ms.

    Attributes:
        cpu: of the host.
        gpu: of the GPU; empty without one.
        beside_ms: of the GPU's messages, the part beside computations.
        iterations: number of iterations.
    """

    cpu: dict[str, float]
    gpu: dict[str, float]
    beside_ms: float
    iterations: int


def time_by_kind(events: Sequence[Event]) -> TimeByKind:
    """The time of the iterations that ``events`` mark; without a mark there is none."""
    marks = sorted(each for each in events if each.name.startswith(ITERATION) and each.thread is not None)
    ranges = [(mark.start, mark.end) for mark in sorted(marks, key=lambda mark: mark.start)]
    scale = 1e-3 / max(1, len(ranges))
    main = marks[0].thread if marks else None
    threads: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.thread is not None and not event.is_async and (event.thread == main or not event.is_annotation):
            threads[event.thread].append(event)
    others = [_innermost(of_thread) for thread, of_thread in threads.items() if thread != main]
    waits = _in_turn(Segment(e.start, e.end, COMMUNICATION) for e in events if e.is_async and e.thread is not None)
    own = _innermost(threads[main]) if main is not None else []
    cpu = _painted(ranges, [own, *others, waits], PYTHON)
    kernels = [Segment(e.start, e.end, kind_of(e.name)) for e in events if e.thread is None and not e.is_annotation]
    messages = _in_turn(each for each in kernels if each.kind == COMMUNICATION)
    work = _in_turn(each for each in kernels if each.kind != COMMUNICATION)
    gpu = _painted(ranges, [work, messages], IDLE) if kernels else {}
    sent = _painted(ranges, [messages], IDLE).get(COMMUNICATION, 0.0) if kernels else 0.0
    return TimeByKind(
        {kind: scale * time for kind, time in cpu.items()},
        {kind: scale * time for kind, time in gpu.items()},
        scale * (sent - gpu.get(COMMUNICATION, 0.0)),
        len(ranges),
    )


_known_kind = lru_cache(maxsize=4096)(kind_of)


def _kind_inside(event: Event, outer: str) -> str:
    """Kind of an event of the host inside an event of the kind ``outer``."""
    if event.is_annotation and event.name in _PARTS:
        return _PARTS[event.name]
    if event.is_annotation or outer == DATA:
        return outer
    kind = _known_kind(event.name)
    if outer == OPTIMIZER:
        return kind if kind == COMMUNICATION else OPTIMIZER
    # A part of an operation, such as the view in a product, is of its kind.
    return outer if kind == OTHER and outer != PYTHON else kind


def _innermost(events: Iterable[Event]) -> list[Segment]:
    """The innermost event at each moment of one thread, without those outside of any operation."""
    found: list[Segment] = []
    open_ones: list[tuple[float, str]] = []
    now = 0.0

    def advance(until: float) -> None:
        nonlocal now
        if open_ones and until > now and open_ones[-1][1] != PYTHON:
            found.append(Segment(now, until, open_ones[-1][1]))
        now = max(now, until)

    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        while open_ones and open_ones[-1][0] <= event.start:
            advance(open_ones[-1][0])
            open_ones.pop()
        advance(event.start)
        open_ones.append((event.end, _kind_inside(event, open_ones[-1][1] if open_ones else PYTHON)))
    while open_ones:
        advance(open_ones[-1][0])
        open_ones.pop()
    return found


def _in_turn(segments: Iterable[Segment]) -> list[Segment]:
    """Segments that may overlap, as disjoint ones: the earlier one counts."""
    found: list[Segment] = []
    end = 0.0
    for segment in sorted(segments):
        if segment.end > end:
            found.append(segment._replace(start=max(segment.start, end)))
            end = segment.end
    return found


def _painted(ranges: Sequence[tuple[float, float]], layers: Iterable[Sequence[Segment]], rest: str) -> dict[str, float]:
    """Time in ``ranges`` by kind: that of the first layer with a segment, else ``rest``. The longest come first.

    Ranges, and the segments of a layer, are disjoint and in order.
    """
    totals: defaultdict[str, float] = defaultdict(float)
    free = list(ranges)
    for layer in layers:
        left: list[tuple[float, float]] = []
        place = 0
        for begin, end in free:
            while place < len(layer) and layer[place].end <= begin:
                place += 1
            at = place
            while at < len(layer) and layer[at].start < end:
                start, stop, kind = layer[at]
                if start > begin:
                    left.append((begin, start))
                totals[kind] += min(stop, end) - max(start, begin)
                begin = min(stop, end)
                at += 1
            if begin < end:
                left.append((begin, end))
        free = left
    totals[rest] += sum(end - begin for begin, end in free)
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def table_lines(times: TimeByKind) -> list[str]:
    """The table, one line per kind."""
    columns = [("CPU", times.cpu), *([("GPU", times.gpu)] if times.gpu else [])]
    lines = [" " * 18 + "".join(f"{f'{name} ms':>12} {'share':>6}" for name, _ in columns)]
    kinds = list(dict.fromkeys(kind for _, column in reversed(columns) for kind in column))
    for kind in [*kinds, "whole step"]:
        line = f"{kind:<18}"
        for _, column in columns:
            total = sum(column.values())
            time = total if kind == "whole step" else column.get(kind)
            line += f"{time:>12.2f} {time / (total or 1.0):>6.1%}" if time is not None else " " * 19
        lines.append(line.rstrip())
    if times.gpu:
        lines.append(f"communication beside computation: {times.beside_ms:.2f} ms")
    return lines

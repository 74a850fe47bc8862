"""Drawings of a schedule table as text and SVG, one row per rank. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from trainer.planning.schedule import (
    Action,
    ActionKind,
    PipelineSchedule,
    Timeline,
    kept_activations,
    live_activations,
    message_count,
)

NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "input gradient",
    ActionKind.BACKWARD_WEIGHT: "weight gradients",
}
# Distinguishable with any kind of colour vision, and by lightness alone.
_COLOURS = {
    ActionKind.FORWARD: (59, 111, 182),
    ActionKind.BACKWARD: (46, 139, 120),
    ActionKind.BACKWARD_INPUT: (93, 184, 165),
    ActionKind.BACKWARD_WEIGHT: (240, 171, 68),
}
_INK, _PAPER = (27, 31, 36), (255, 255, 255)
_MOST_LIGHTENED = 0.6
MAX_LENGTH = 100_000
"""Largest length of a row, in shortest actions. A longer drawing is unreadable and would fill the memory."""


class DrawingError(ValueError):
    """A schedule that cannot be drawn."""


@dataclass(frozen=True)
class Drawing:
    """A table with the times of its actions and a title."""

    schedule: PipelineSchedule
    times: Timeline
    title: str

    def __post_init__(self) -> None:
        """Refuse a drawing that would be too long.

        Raises:
            DrawingError: the step is more than MAX_LENGTH times as long as its shortest action.
        """
        length = self.times.step_time / self.shortest
        if length > MAX_LENGTH:
            raise DrawingError(
                f"the step is {length:.3g} times as long as its shortest action, but the limit is "
                f"{MAX_LENGTH:,} times; use durations that are closer to each other, or fewer micro-batches"
            )

    @property
    def shortest(self) -> float:
        """Duration of the shortest action."""
        return min(end - start for row in self.times.rows for start, end in row)

    @property
    def kinds(self) -> list[ActionKind]:
        """Kinds of action in the table, in the order of the legend."""
        present = {action.kind for row in self.schedule.stages for action in row}
        return [kind for kind in ActionKind if kind in present]

    def summary(self) -> str:
        """Step time, bubble and number of messages in one line."""
        times = self.times
        busy = times.step_time * (1 - times.bubble_fraction)
        return (
            f"step time {times.step_time:.4g}, of which {busy:.4g} busy on average: bubble "
            f"{100 * times.bubble_fraction:.1f}%; {message_count(self.schedule)} messages between ranks"
        )

    def held(self, rank: int) -> tuple[str, str]:
        """Peak activations of a rank until the input gradient, and until the weight gradients.

        Unit: activations of one micro-batch in all layers of the rank.
        """
        chunks = self.schedule.placement.chunks
        return (
            f"{live_activations(self.schedule, rank) / chunks:.3g}",
            f"{kept_activations(self.schedule, rank) / chunks:.3g}",
        )

    def blocks(self, rank: int) -> Iterator[tuple[Action, float, float]]:
        """Actions of a rank with start and end."""
        for action, (start, end) in zip(self.schedule.stages[rank], self.times.rows[rank], strict=True):
            yield action, start, end


def colour(schedule: PipelineSchedule, action: Action) -> str:
    """Colour ``#rrggbb`` of an action's kind, lighter for later chunks."""
    last = max(schedule.placement.chunks - 1, 1)
    share = _MOST_LIGHTENED * action.chunk / last
    mixed = (round(c + (p - c) * share) for c, p in zip(_COLOURS[action.kind], _PAPER, strict=True))
    return _hex(*mixed)


def ink_on(background: str) -> str:
    """Black or white, whichever is readable on ``background``."""
    red, green, blue = (int(background[i : i + 2], 16) for i in (1, 3, 5))
    # Relative brightness of the primaries: ITU-R BT.601.
    return _hex(*_INK) if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else _hex(*_PAPER)


def _hex(red: int, green: int, blue: int) -> str:
    return f"#{red:02x}{green:02x}{blue:02x}"


@dataclass(frozen=True)
class Cell:
    """Text on a background colour; None while a rank waits."""

    text: str
    background: str | None = None


def text_rows(drawing: Drawing, *, coloured: bool, padding: int = 0) -> list[list[Cell]]:
    """Rows of cells, of equal length in characters and equal time scale.

    Args:
        drawing: the drawing.
        coloured: label cells by their micro-batch only; colour and legend show the rest.
        padding: spaces beside the longest label in the shortest cell.
    """
    labels = {action: _label(action, coloured) for row in drawing.schedule.stages for action in row}
    # The longest label fits the shortest action, with a gap that keeps neighbours apart.
    per_time = (max(map(len, labels.values())) + padding + 1) / drawing.shortest
    return [
        _text_row(drawing, rank, labels, per_time, coloured=coloured) for rank in range(len(drawing.schedule.stages))
    ]


def _label(action: Action, coloured: bool) -> str:
    return str(action.micro_batch) if coloured else str(action)


def _text_row(drawing: Drawing, rank: int, labels: dict[Action, str], per_time: float, *, coloured: bool) -> list[Cell]:
    cells: list[Cell] = []
    column = 0
    idle = " " if coloured else "·"
    for action, start, end in drawing.blocks(rank):
        first, stop = round(start * per_time), round(end * per_time)
        cells += [Cell(idle * (first - column))] if first > column else []
        width = stop - first - 1
        text = labels[action].center(width) if coloured else labels[action].ljust(width, "-")
        cells += [Cell(text, colour(drawing.schedule, action)), Cell(" ")]
        column = stop
    rest = round(drawing.times.step_time * per_time) - column
    return [*cells, Cell(idle * rest)] if rest > 0 else cells


def cut(cells: list[Cell], start: int, stop: int) -> list[Cell]:
    """Characters ``start`` to ``stop`` of a row."""
    part: list[Cell] = []
    column = 0
    for cell in cells:
        text = cell.text[max(start - column, 0) : max(stop - column, 0)]
        part += [Cell(text, cell.background)] if text else []
        column += len(cell.text)
    return part


_FONT = "font-family='ui-sans-serif, Helvetica, Arial, sans-serif'"
_ROW, _BAR, _LEFT, _TOP, _RIGHT, _BOTTOM = 34, 26, 70, 104, 150, 74
_LABEL_WIDTH = 9
_TICK = 60


def svg(drawing: Drawing) -> str:
    """Render the table as an SVG document; tooltips show each action's kind and times."""
    schedule, times = drawing.schedule, drawing.times
    digits = len(str(schedule.num_micro_batches - 1))
    scale = max((10 + _LABEL_WIDTH * digits) / drawing.shortest, 640 / times.step_time)
    width = _LEFT + times.step_time * scale + _RIGHT
    height = _TOP + _ROW * len(schedule.stages) + _BOTTOM
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height}' "
        f"viewBox='0 0 {width:.0f} {height}' {_FONT} font-size='13' fill='{_hex(*_INK)}'>",
        f"<rect width='100%' height='100%' fill='{_hex(*_PAPER)}'/>",
        f"<text x='{_LEFT}' y='28' font-size='18' font-weight='600'>{escape(drawing.title)}</text>",
        f"<text x='{_LEFT}' y='50' fill='#57606a'>{escape(drawing.summary())}</text>",
        *_legend(drawing),
        _note(width - _RIGHT + 14, _TOP - 10, "activations: live, kept"),
    ]
    for rank in range(len(schedule.stages)):
        parts += _svg_row(drawing, rank, scale, width)
    return "\n".join([*parts, *_time_axis(times, scale, height), "</svg>", ""])


def _svg_row(drawing: Drawing, rank: int, scale: float, width: float) -> Iterator[str]:
    top = _TOP + _ROW * rank
    middle = top + _BAR / 2 + 4.5
    yield f"<text x='{_LEFT - 12}' y='{middle}' text-anchor='end'>rank {rank}</text>"
    whole = drawing.times.step_time * scale
    yield f"<rect x='{_LEFT}' y='{top}' width='{whole:.1f}' height='{_BAR}' fill='#eef1f4' rx='3'/>"
    for action, start, end in drawing.blocks(rank):
        ground = colour(drawing.schedule, action)
        left, size = _LEFT + start * scale, (end - start) * scale
        what = f"{NAMES[action.kind]} of micro-batch {action.micro_batch}"
        what += f", chunk {action.chunk}" if drawing.schedule.placement.chunks > 1 else ""
        yield (
            f"<g><title>{what}: {start:.4g} to {end:.4g}</title>"
            f"<rect x='{left + 0.5:.1f}' y='{top}' width='{size - 1:.1f}' height='{_BAR}' rx='3' fill='{ground}'/>"
            f"<text x='{left + size / 2:.1f}' y='{middle}' text-anchor='middle' fill='{ink_on(ground)}'>"
            f"{action.micro_batch}</text></g>"
        )
    live, kept = drawing.held(rank)
    yield f"<text x='{width - _RIGHT + 14:.0f}' y='{middle}' fill='#57606a'>{live}, {kept}</text>"


def legend_entries(drawing: Drawing) -> list[tuple[str, str]]:
    """(colour, label) of every kind of action and chunk in the drawing."""
    chunks = drawing.schedule.placement.chunks
    return [
        (
            colour(drawing.schedule, Action(kind, 0, chunk)),
            NAMES[kind] + (f", chunk {chunk}" if chunks > 1 else ""),
        )
        for kind in drawing.kinds
        for chunk in range(chunks)
    ]


def _legend(drawing: Drawing) -> Iterator[str]:
    left = float(_LEFT)
    for ground, words in legend_entries(drawing):
        yield f"<rect x='{left:.0f}' y='62' width='13' height='13' rx='3' fill='{ground}'/>"
        yield f"<text x='{left + 18:.0f}' y='73' font-size='12'>{escape(words)}</text>"
        left += 34 + 6.4 * len(words)


def _time_axis(times: Timeline, scale: float, height: int) -> Iterator[str]:
    base = height - _BOTTOM + 6
    yield f"<line x1='{_LEFT}' x2='{_LEFT + times.step_time * scale:.1f}' y1='{base}' y2='{base}' stroke='#8c959f'/>"
    # The smallest of 1, 2, 5, 10, ... that leaves space between the numbers.
    power = 10 ** math.floor(math.log10(_TICK / scale))
    tick = next(power * step for step in (1, 2, 5, 10) if power * step * scale >= _TICK)
    for number in range(int(times.step_time / tick) + 1):
        time = number * tick
        at = _LEFT + time * scale
        yield f"<line x1='{at:.1f}' x2='{at:.1f}' y1='{base}' y2='{base + 5}' stroke='#8c959f'/>"
        yield f"<text x='{at:.1f}' y='{base + 20}' text-anchor='middle' fill='#57606a' font-size='11'>{time:.4g}</text>"
    yield _note(
        _LEFT, base + 40, "Time in the unit of the durations. Activations in micro-batches through all layers of"
    )
    yield _note(_LEFT, base + 55, "the rank: live until the gradient of the input, kept until those of the weights.")


def _note(x: float, y: float, words: str) -> str:
    return f"<text x='{x:.0f}' y='{y}' fill='#57606a' font-size='11'>{escape(words)}</text>"

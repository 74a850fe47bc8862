"""``python -m trainer draw-pipeline``: draw a pipeline schedule as text and as SVG."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.planning.schedule import (
    SCHEDULE_KINDS,
    ActionKind,
    ScheduleError,
    build_schedule,
    default_chunks,
    placement_of,
    timeline,
)
from trainer.planning.schedule.draw import (
    NAMES,
    Cell,
    Drawing,
    DrawingError,
    cut,
    ink_on,
    legend_entries,
    svg,
    text_rows,
)

_USAGE = 2
MAX_SLOTS = 300_000
"""Limit on ranks times actions per rank (fill and drain included): the largest table takes seconds."""
_SHORTEST, _LONGEST = 1e-12, 1e12


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code.

    2: flags do not fit together. 3: the SVG cannot be written.
    """
    options = parser_of().parse_args(arguments)
    try:
        drawing = _draw(options)
    except (DrawingError, ScheduleError) as error:
        print(f"trainer draw-pipeline: {error}", file=sys.stderr)
        return _USAGE
    if options.svg is not None:
        try:
            options.svg.write_text(svg(drawing), encoding="utf-8")
        except OSError as error:
            print(f"trainer draw-pipeline: {options.svg}: cannot be written: {error.strerror}", file=sys.stderr)
            return 3
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        _paint(drawing)
    else:
        print("\n".join(_plain_lines(drawing)))
    if options.svg is not None:
        print(f"{options.svg}: written", file=sys.stderr)
    return 0


def parser_of() -> argparse.ArgumentParser:
    """Parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer draw-pipeline",
        description="Draw a pipeline schedule: each rank's actions over time, the bubble, and the activations held.",
        epilog="Durations are those of all layers of a rank; a model chunk takes its share of them.",
    )
    parser.add_argument("--schedule", default="1f1b", metavar="NAME", help=f"one of {', '.join(SCHEDULE_KINDS)}")
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=4, metavar="P", help="ranks; default: 4")
    parser.add_argument("--num-micro-batches", type=int, default=8, metavar="M", help="micro-batches; default: 8")
    parser.add_argument("--chunks", type=int, metavar="V", help="virtual stages per rank; default: the fewest")
    parts = {"forward": "forward", "backward-input": "backward for inputs", "backward-weight": "backward for weights"}
    for name, what in parts.items():
        told = f"duration of {what}; default: 1"
        parser.add_argument(f"--{name}", type=_duration, default=1.0, metavar="TIME", help=told)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also write the drawing to FILE")
    return parser


def _duration(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not _SHORTEST <= value <= _LONGEST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a duration: give a number above 0, from {_SHORTEST:g} to {_LONGEST:g}"
        )
    return value


def _draw(options: argparse.Namespace) -> Drawing:
    kind, pp, count = options.schedule, options.pipeline_model_parallel_size, options.num_micro_batches
    chunks = default_chunks(kind) if options.chunks is None else options.chunks
    placement_of(kind, pp, chunks)
    if pp * chunks * (pp + count) > MAX_SLOTS:
        raise DrawingError(
            f"{_count(pp, 'rank', 'ranks')} with {_count(count, 'micro-batch', 'micro-batches')} and "
            f"{_count(chunks, 'chunk', 'chunks')} each are too many to draw: ranks x chunks x (ranks + micro-batches) "
            f"may be {MAX_SLOTS:,} at most; choose fewer"
        )
    schedule = build_schedule(kind, pp, chunks, count)
    durations = {
        ActionKind.FORWARD: options.forward / chunks,
        ActionKind.BACKWARD_INPUT: options.backward_input / chunks,
        ActionKind.BACKWARD_WEIGHT: options.backward_weight / chunks,
    }
    title = f"{kind}: {_count(pp, 'rank', 'ranks')}, {_count(count, 'micro-batch', 'micro-batches')}"
    title += f", {chunks} chunks on each rank" if chunks > 1 else ""
    return Drawing(schedule, timeline(schedule, durations), title)


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _rank_lines(drawing: Drawing) -> list[str]:
    ranks = range(len(drawing.schedule.stages))
    lines = [f"{'':8}{'waits':>8}{'live':>8}{'kept':>8}"]
    for rank in ranks:
        live, kept = drawing.held(rank)
        waits = 100 * drawing.times.idle_time(rank) / drawing.times.step_time
        lines.append(f"rank {rank:<3}{waits:>7.1f}%{live:>8}{kept:>8}")
    return lines


_UNITS = (
    "live: most activations held until the gradient of the inputs; kept: until the gradients of the weights;",
    "both in micro-batches through all layers of the rank.",
)


def _plain_lines(drawing: Drawing) -> list[str]:
    rows = text_rows(drawing, coloured=False)
    pictured = [f"rank {rank:<3}|" + "".join(cell.text for cell in row) for rank, row in enumerate(rows)]
    names = ", ".join(f"{kind.value} {NAMES[kind]}" for kind in drawing.kinds)
    chunked = "; F0.1 is micro-batch 0 in chunk 1" if drawing.schedule.placement.chunks > 1 else ""
    return [
        drawing.title,
        drawing.summary(),
        "",
        *(line.rstrip() for line in pictured),
        "",
        f"{names}, · waits{chunked}",
        "",
        *_rank_lines(drawing),
        *_UNITS,
    ]


def _fitting_rows(drawing: Drawing, room: int) -> tuple[list[list[Cell]], int]:
    """The rows with the widest padding that fits ``room``, and their length.

    Without padding if none fits.
    """
    for padding in (2, 1, 0, 1):
        rows = text_rows(drawing, coloured=True, padding=padding)
        length = max(sum(len(cell.text) for cell in row) for row in rows)
        if length <= room:
            break
    return rows, length


def _paint(drawing: Drawing) -> None:
    """Print in colour to a terminal, in as many panels as its width requires."""
    from rich.console import Console
    from rich.style import Style
    from rich.text import Text

    console = Console(highlight=False)
    console.print(drawing.title, style="bold")
    console.print(drawing.summary(), style="dim")
    room = max(shutil.get_terminal_size().columns - len("rank 0  "), 20)
    rows, length = _fitting_rows(drawing, room)
    for start in range(0, length, room):
        console.print()
        for rank, row in enumerate(rows):
            line = Text().append(f"rank {rank:<3}", "dim")
            for cell in cut(row, start, start + room):
                ground = cell.background
                line.append(cell.text, Style(color=ink_on(ground), bgcolor=ground) if ground else None)
            console.print(line, no_wrap=True, overflow="crop", crop=True)
    legend = Text()
    for ground, words in legend_entries(drawing):
        legend.append("   ", Style(bgcolor=ground)).append(f" {words}   ")
    console.print()
    console.print(legend)
    console.print()
    for line_of_rank in _rank_lines(drawing):
        console.print(line_of_rank)
    for words in _UNITS:
        console.print(words, style="dim")

"""The page of ``llmctl plan``: this run, its speed, its memory and the start of a step."""

import sys
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from llmctl.cli.console import is_for_people, rich_console
from llmctl.cli.plan_page import INDENT, labelled_lines, note_lines, terminal_width
from llmctl.context import say
from llmctl.durations import duration_text
from llmctl.runs.number_text import ASCII_BARS, BARS, is_utf8, memory_text

if TYPE_CHECKING:
    from rich.console import Console

    from llmctl.submit.preview.predict import PlanInputs, Prediction
    from trainer.planning.estimate.plan import RunPlan
    from trainer.planning.schedule.draw import Drawing

_WIDEST = 120
_IN_A_PIPE = 100
_ITEM = 28
"""Columns of an item of memory and its size, before its bar."""
_MOST_RANKS = 16
_LEAST_SHOWN = 1 << 20
_SECONDS_PER_DAY = 86400
_SHOWN = 0.005
"""Smallest share of a step that is named."""


def show_prediction(planned: "RunPlan", inputs: "PlanInputs", prediction: "Prediction") -> None:
    """Print the page; what does not fit, and a change that makes it fit, on standard error."""
    nodes, per_node = inputs.nodes, inputs.gpus_per_node
    console = rich_console() if is_for_people() else None
    heading = f"{nodes} node{'s' * (nodes > 1)} x {per_node} {planned.device.name}: "
    _print(console, heading + planned.verdict)
    for line in labelled_lines(_rows(planned, inputs, prediction), sys.stdout):
        _print(console, line)
    _show_timeline(planned, console)
    for line in note_lines(_notes(planned, nodes, per_node), sys.stderr):
        say(line)


def limits_text(limits: Mapping[str, float]) -> str:
    """Shares of a step that are worth a word, the largest first; empty: none is."""
    shares = sorted(limits.items(), key=lambda each: -each[1])
    return ", ".join(f"{name.replace('_', ' ')} {100 * share:.0f}%" for name, share in shares if share >= _SHOWN)


def _print(console: "Console | None", line: str) -> None:
    """A line, with coloured bars and verdict on a terminal."""
    if console is None:
        print(line)
        return
    from rich.text import Text

    text = Text(line)
    text.highlight_regex(r"(?<=: )fits$", "green")
    text.highlight_regex(r"(?<=: )tight$", "yellow")
    text.highlight_regex(r"(?<=: )does not fit$", "red")
    text.highlight_regex(rf"  {_block()}+$", "cyan")
    console.print(text, soft_wrap=True)


def _rows(planned: "RunPlan", inputs: "PlanInputs", prediction: "Prediction") -> Iterator[tuple[str, str]]:
    node_hours, cost = prediction.node_hours, prediction.cost
    step, steps = planned.step, planned.config.training.train_iters
    is_gpu = planned.device.name != "CPU"
    took = step.total * planned.config.full_iters
    run = f"{steps:,} step{'s' * (steps > 1)} in {duration_text(took) if took >= 1 else 'less than 1 s'}"
    run += f" at {step.total:.3g} s a {'full ' if planned.config.changes_batch_size else ''}step"
    # The CPU of this machine is billed by nobody, and no data sheet has its peak.
    run += f", {_amount(node_hours)} node-hours" if is_gpu else ""
    run += "" if cost is None else f", {_amount(cost['points'])} {cost['unit']}"
    yield "run", run
    speed = f"{planned.tokens_per_s:,.0f} tokens/s per device"
    if is_gpu:
        full, causal = planned.utilization
        speed += f", {planned.tflops:,.3g} TFLOP/s, MFU {100 * full:.1f}% (causal {100 * causal:.1f}%)"
    yield "speed", speed
    if is_gpu:
        days = 1e12 / (planned.tokens_per_s * planned.world_size * _SECONDS_PER_DAY)
        yield "", f"{_amount(days)} days for a trillion tokens"
    where = ""
    if len(planned.schedule.stages) > 1:
        yield "bubble", f"{100 * step.times.bubble_fraction:.1f}% of the time, in which a rank waits for another"
        where = f" on pipeline rank {planned.worst.pp_rank}"
    of_step = limits_text(planned.limits)
    if of_step:
        yield "limits", f"of the step: {of_step}"
    yield from _sources(inputs)
    yield "memory", f"{memory_text(planned.worst.total)} of {memory_text(planned.device.memory)}{where}"
    yield from (("", line) for line in _memory_lines(planned))


def _sources(inputs: "PlanInputs") -> Iterator[tuple[str, str]]:
    """Measurements behind the prediction, if it does not come from the data sheet alone."""
    known = inputs.known
    if known is None:
        return
    if known.hardware is not None:
        yield "measured", f"by llmctl env bench, on {known.hardware['date'][:10]}; --uncalibrated leaves that out"
    if known.calibration is not None:
        made = datetime.fromtimestamp(known.calibration.time, timezone.utc)
        count = len(known.calibration.runs)
        yield "fitted", f"to {count} of your runs there, on {made:%Y-%m-%d}; --uncalibrated leaves that out"


def _memory_lines(planned: "RunPlan") -> Iterator[str]:
    """An item of the fullest rank, its size and its bar; a full bar is the memory of the device."""
    longest = _room() - _ITEM
    for item, size in planned.worst.bytes_of.items():
        if size >= _LEAST_SHOWN:
            bar = _block() * min(longest, round(longest * size / planned.device.memory))
            yield f"{item.replace('_', ' '):16}{memory_text(size):>10}  {bar}".rstrip()


def _notes(planned: "RunPlan", nodes: int, per_node: int) -> Iterator[str]:
    """The reason why the run does not fit, and the smallest change that makes it fit."""
    from trainer.planning.estimate.devices import GIB
    from trainer.planning.estimate.plan import remedy

    yield from planned.remarks
    if planned.why_not is None:
        return
    yield f"does not fit: {planned.why_not}"
    found = remedy(planned, nodes, per_node)
    if found is None:
        yield "no single change makes it fit: use more nodes or a larger device, or try --search"
        return
    change, fitting = found
    keys = " ".join(f"--set {key}={str(value).lower()}" for key, value in change.values.items() if value != [])
    yield f"fits with {change.words} at {fitting.worst.total / GIB:.1f} GiB: {keys}"


def _show_timeline(planned: "RunPlan", console: "Console | None") -> None:
    """The start of a step, a row for each rank; nothing without a pipeline."""
    from trainer.planning.schedule.draw import Drawing, DrawingError, text_rows

    if len(planned.schedule.stages) == 1:
        return
    try:
        drawing = Drawing(planned.schedule, planned.step.times, "timeline")
    except DrawingError:
        return
    if console is not None and console.color_system is not None and not console.no_color:
        _paint_timeline(drawing, console)
        return
    from trainer.planning.schedule.draw import NAMES

    rows = ["".join(cell.text for cell in row) for row in text_rows(drawing, coloured=False)]
    kinds = ", ".join(f"{kind.value} {NAMES[kind]}" for kind in drawing.kinds)
    legend = f"{_shown(len(rows[0]))}; {kinds}, · waits; the number is the micro-batch"
    for line in labelled_lines([("timeline", legend)], sys.stdout):
        print(_plain(line))
    for rank, row in enumerate(rows[:_MOST_RANKS]):
        print(_plain(f"  {f'rank {rank}':{INDENT - 2}}{row[: _room()]}").rstrip())


def _paint_timeline(drawing: "Drawing", console: "Console") -> None:
    from rich.style import Style
    from rich.text import Text

    from trainer.planning.schedule.draw import cut, ink_on, legend_entries, text_rows

    rows = text_rows(drawing, coloured=True)
    length = max(sum(len(cell.text) for cell in row) for row in rows)
    console.print(f"  {'timeline':{INDENT - 2}}{_shown(length)}; the number is the micro-batch", soft_wrap=True)
    legend = Text(" " * INDENT)
    for ground, words in legend_entries(drawing):
        legend.append("  ", Style(bgcolor=ground)).append(f" {words}  ")
    console.print(legend)
    for rank, row in enumerate(rows[:_MOST_RANKS]):
        line = Text(f"  {f'rank {rank}':{INDENT - 2}}")
        for cell in cut(row, 0, _room()):
            background = cell.background
            line.append(cell.text, Style(color=ink_on(background), bgcolor=background) if background else None)
        console.print(line, soft_wrap=True)


def _shown(length: int) -> str:
    """The part of a row of ``length`` characters that the page has room for."""
    return "one step" if length <= _room() else f"the first {100 * _room() / length:.2g}% of a step"


def _room() -> int:
    """Columns after the label of a row."""
    return min(_WIDEST, terminal_width(sys.stdout) or _IN_A_PIPE) - INDENT


def _block() -> str:
    return BARS[-1] if is_utf8(sys.stdout.encoding) else ASCII_BARS[-1]


def _plain(line: str) -> str:
    return line if is_utf8(sys.stdout.encoding) else line.replace("·", ".")


def _amount(number: float) -> str:
    """Two digits at least: ``0.012``, ``4.1``, ``12``, ``2,055``."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"

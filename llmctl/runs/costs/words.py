"""Costs of a run as lines of text. Pure."""

from collections.abc import Iterator

from llmctl.durations import duration_text
from llmctl.runs.costs.save_interval import SaveAdvice
from llmctl.runs.costs.time_split import AttemptCost, RunCosts
from llmctl.runs.number_text import iteration_time_text
from llmctl.terminal_text import printable

KINDS = {
    "queue_s": "in the queue",
    "start_s": "starts",
    "steps_s": "steps that count",
    "saves_s": "saves",
    "lost_steps_s": "lost steps",
    "hang_s": "until failures were seen",
    "end_s": "ends",
    "pause_s": "between attempts",
}
"""Field of TimeSplit -> its name."""
MOST_ATTEMPTS = 10
"""Newest attempts that have a line; ``--json`` and the report have all."""
_LEAST_S = 0.5
_CAUSE_WIDTH = 160


def cost_lines(costs: RunCosts) -> Iterator[tuple[str, str]]:
    """Names and lines about the costs of a run: ETTR with its losses, each of several attempts, advice on saves."""
    if costs.ettr is not None:
        yield "ETTR", ettr_text(costs)
    if len(costs.attempts) > 1:
        for attempt in costs.attempts[-MOST_ATTEMPTS:]:
            yield f"attempt {attempt.number}", attempt_text(attempt)
    if costs.save is not None and costs.save.is_off:
        yield "advice", advice_text(costs.save)


def ettr_text(costs: RunCosts) -> str:
    """``96.3%: lost 12 min of 5 h 2 min: 4 min lost steps, 3 min starts``."""
    if costs.ettr is None:
        return ""
    lost = {name: getattr(costs.time, name) for name in KINDS if name not in ("queue_s", "steps_s")}
    parts = sorted(((seconds, KINDS[name]) for name, seconds in lost.items() if seconds >= _LEAST_S), reverse=True)
    listed = ", ".join(f"{duration_text(seconds)} {name}" for seconds, name in parts)
    words = f"{100 * costs.ettr:.1f}%: lost {duration_text(costs.lost_s)} of {duration_text(costs.wall_s)}"
    words += f": {listed}" if listed else ""
    queue = costs.time.queue_s
    if queue >= 1 and costs.ettr_with_queue is not None:
        words += f"; {100 * costs.ettr_with_queue:.1f}% with {duration_text(queue)} in the queue"
    return words


def attempt_text(attempt: AttemptCost) -> str:
    """``failed (killed), iterations 1 to 34, lost 14 steps and 52 s: the cause``."""
    reason = attempt.reason or "no end recorded"
    parts = [f"{reason} ({attempt.failure_class})" if attempt.failure_class else reason]
    if attempt.first_iteration is not None:
        parts.append(f"iterations {attempt.first_iteration} to {attempt.last_iteration}")
    steps = f"{attempt.lost_steps} step{'s' * (attempt.lost_steps != 1)} and " if attempt.lost_steps else ""
    parts.append(f"lost {steps}{duration_text(attempt.lost_s)}")
    cause = " ".join(printable(attempt.cause).split())
    cause = cause if len(cause) <= _CAUSE_WIDTH else f"{cause[:_CAUSE_WIDTH].rstrip()}..."
    return ", ".join(parts) + (f": {cause}" if cause else "")


def advice_text(save: SaveAdvice) -> str:
    """The interval of saves in use, the advised one, and the numbers behind it."""
    used = f"save_interval {save.interval:,}" if save.interval is not None else "no save_interval"
    origin = "as published" if save.faults is None else f"from {save.faults} faults of your runs here"
    rate = f"{save.faults_per_node_day:.2g} faults per node-day {origin}"
    return (
        f"checkpoint.save_interval {save.advised:,} costs {_share(save.advised_cost)} of the time, {used} costs "
        f"{_share(save.cost)}: a save takes {iteration_time_text(save.save_s)}, an iteration "
        f"{iteration_time_text(save.step_s)}; a fault every {duration_text(save.mtbf_s)} ({rate})"
    )


def _share(part: float) -> str:
    return f"{100 * part:.2g}%"

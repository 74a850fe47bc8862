"""The tables of the page as text: head, attempts, faults, plan beside measured. Pure."""

import math
import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime
from statistics import median
from typing import Any

from llmctl.durations import duration_text
from llmctl.operate.report.gather import Attempt, ReportedRun
from llmctl.operate.report.secret_words import shown_command
from llmctl.runs.costs.words import KINDS, advice_text, ettr_text
from llmctl.runs.number_text import iteration_time_text, loss_text, memory_text, rate_text
from llmctl.runs.series.curves import RunCurves

_BAR = 1000.0
"""Width of a bar of time."""
_MOST_HOSTS = 8
_LEAST_SHOWN = 1 << 20
_LEAST_S = 0.5
"""Shorter times are left out."""
_TONES = {"completed": "good", "running": "busy", "pending": "busy", "cancelled": "calm", "unknown": "calm"}
"""State -> tone of its mark; every other state is a failure."""


def head_of(run: ReportedRun) -> dict[str, Any]:
    """Name, state and the few numbers that stand first."""
    view = run.past.view
    return {
        "id": run.record.run_id,
        "name": run.record.name,
        "state": view.state.value,
        "tone": _TONES.get(view.state.value, "bad"),
        "detail": ""
        if view.detail in (view.state.value, f"{view.state} at iteration {view.iteration}")
        else view.detail,
        "facts": list(_facts(run)),
        "tiles": list(tiles_of(run)),
    }


def tiles_of(run: ReportedRun) -> Iterator[tuple[str, str]]:
    """The few numbers of a run that stand first, by name; those that it does not have are left out."""
    view, past = run.past.view, run.past
    if view.iteration is not None:
        total = f" / {view.train_iters:,}" if view.train_iters is not None else ""
        yield "iteration", f"{view.iteration:,}{total}"
    if view.loss is not None:
        yield "loss", loss_text(view.loss)
    valid = run.curves.valid.of.get("valid_loss")
    if valid is not None:
        yield "validation loss", loss_text([loss for loss in valid.mean if loss is not None][-1])
    if view.tokens_per_s is not None:
        yield "tokens/s", rate_text(view.tokens_per_s)
    if view.mfu is not None:
        yield "MFU", f"{100 * view.mfu:.1f}%"
    if view.peak_memory_bytes is not None:
        yield "peak memory", memory_text(view.peak_memory_bytes)
    if past.node_hours:
        yield "node-hours", _amount(past.node_hours)
    if past.points:
        yield "cost", f"{_amount(past.points)} {past.unit}".strip()


def _facts(run: ReportedRun) -> Iterator[tuple[str, str]]:
    record, view = run.record, run.past.view
    nodes = record.job.get("nodes")
    yield "cluster", record.cluster + (f", {nodes} node{'s' * (nodes > 1)}" if isinstance(nodes, int) else "")
    if view.hosts:
        more = len(view.hosts) - _MOST_HOSTS
        yield "hosts", ", ".join(view.hosts[:_MOST_HOSTS]) + (f" and {more} more" if more > 0 else "")
    yield "submitted", clock_text(record.created)
    if view.ended is not None:
        yield "ended", clock_text(view.ended)
    if record.owner:
        yield "owner", record.owner
    yield "folder", str(record.run_dir)
    yield "command", shlex.join(shown_command(record.command))
    commit = record.code.get("commit")
    if commit:
        yield "commit", commit
    yield "llmctl", record.llmctl_version


def attempts_of(run: ReportedRun) -> list[dict[str, Any]]:
    """A row for each attempt: start, time, steps, steps done in vain, time lost, end with the class of a failure."""
    rows = []
    for attempt, cost in zip(run.attempts, run.costs.attempts, strict=True):
        began = attempt.started.time if attempt.started is not None else None
        ended = attempt.ending.time if attempt.ending is not None else None
        steps, undone = "", ""
        if cost.first_iteration is not None:
            steps = f"{cost.first_iteration:,} to {cost.last_iteration:,}"
        if cost.lost_steps:
            undone = f"{cost.lost_steps:,} steps, {duration_text(cost.time.lost_steps_s)}"
        rows.append(
            {
                "number": attempt.number,
                "started": clock_text(began) if began is not None else "",
                "took": duration_text(ended - began) if began is not None and ended is not None else "",
                "steps": steps,
                "undone": undone,
                "lost": duration_text(cost.lost_s) if cost.lost_s >= _LEAST_S else "",
                "hosts": ", ".join(attempt.hosts[:_MOST_HOSTS]),
                "end": _end_words(attempt),
                "failed": attempt.has_failed,
                "cause": cost.cause or _cause(attempt),
            }
        )
    return rows


def _end_words(attempt: Attempt) -> str:
    ending = attempt.ending
    if ending is None:
        return "no end recorded"
    words = f"{ending.reason} ({ending.failure_class})" if ending.failure_class else ending.reason
    if ending.signal:
        words += f" by {ending.signal}"
    return words + (f", exit code {ending.code}" if ending.code else "")


def _cause(attempt: Attempt) -> str:
    if attempt.error is not None:
        return attempt.error.summary()
    return attempt.ending.cause if attempt.ending is not None else ""


def time_of(run: ReportedRun) -> dict[str, Any] | None:
    """The bar of time with its legend; None without a time."""
    costs = run.costs
    seconds = {name: getattr(costs.time, name) for name in KINDS}
    seconds = {name: value for name, value in seconds.items() if value >= _LEAST_S}
    total = sum(seconds.values())
    if not total:
        return None
    left = 0.0
    blocks = []
    for name, value in seconds.items():
        width = _BAR * value / total
        blocks.append(
            {
                "kind": name.removesuffix("_s").replace("_", "-"),
                "words": KINDS[name] if run.record.config is not None or name != "steps_s" else "the command",
                "time": duration_text(value),
                "share": f"{100 * value / total:.0f}%",
                "x": f"{left:.1f}",
                "width": f"{width:.1f}",
            }
        )
        left += width
    save = costs.save
    return {
        "blocks": blocks,
        "total": duration_text(total),
        "ettr": ettr_text(costs),
        "advice": advice_text(save) if save is not None and save.is_off else "",
    }


def plan_rows(run: ReportedRun) -> dict[str, Any] | None:
    """Plan beside measured; None for a COMMAND. ``why`` is the reason why there is no plan."""
    planned = run.planned
    if planned is None:
        return None
    if isinstance(planned, str):
        return {"why": planned, "rows": [], "memory": []}
    plan, rows = planned.plan, []
    world = plan.world_size
    # A prediction that says nothing about the first steps is compared with the middle of the run.
    times, rates = _means(run.curves, "iteration_time_s"), _means(run.curves, "tokens_per_s")
    rows.append(_beside("time of a step", plan.step.total, median(times) if times else None, iteration_time_text))
    rows.append(_beside("tokens/s", plan.tokens_per_s * world, median(rates) if rates else None, rate_text))
    shares = _means(run.curves, "mfu")
    if shares:
        rows.append(_beside("MFU", plan.utilization[0], median(shares), lambda value: f"{100 * value:.1f}%"))
    memory_curve = run.curves.train.of.get("peak_memory_bytes")
    peaks = [] if memory_curve is None else [peak for peak in memory_curve.high if peak is not None]
    rows.append(_beside("peak memory of a rank", float(plan.worst.total), max(peaks, default=None), memory_text))
    hours = plan.step.total * plan.config.full_iters * planned.nodes / 3600
    rows.append(_beside("node-hours", hours, run.past.node_hours, _amount))
    memory = [
        {
            "rank": rank.pp_rank,
            "total": memory_text(rank.total),
            "items": [
                (item.replace("_", " "), memory_text(size))
                for item, size in rank.bytes_of.items()
                if size >= _LEAST_SHOWN
            ],
        }
        for rank in plan.ranks
    ]
    device = f"{planned.nodes} x {planned.per_node} {plan.device.name}"
    return {"why": "", "rows": [row for row in rows if row["measured"]], "memory": memory, "device": device}


def memory_of(run: ReportedRun) -> list[dict[str, str]]:
    """The most memory of each rank of the newest attempt; empty if only one rank or none is known."""
    known = [beat for beat in run.heartbeats if beat.peak_memory_bytes]
    largest = max((beat.peak_memory_bytes or 0 for beat in known), default=0)
    return [
        {
            "rank": str(beat.rank),
            "host": beat.host,
            "peak": memory_text(beat.peak_memory_bytes or 0),
            "share": f"{100 * (beat.peak_memory_bytes or 0) / largest:.0f}%",
        }
        for beat in known
        if len(known) > 1
    ]


def _beside(words: str, planned: float, measured: float | None, text: Any) -> dict[str, str]:
    is_known = measured is not None and math.isfinite(measured)
    ratio = f"{measured / planned:.2f}" if is_known and measured is not None and planned > 0 else ""
    return {
        "words": words,
        "planned": text(planned),
        "measured": text(measured) if is_known else "",
        "ratio": ratio,
    }


def _means(curves: RunCurves, key: str) -> list[float]:
    curve = curves.train.of.get(key)
    return [] if curve is None else [mean for mean in curve.mean if mean is not None]


def logs_of(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """Ends of the logs of failed attempts, with the traceback of the rank that failed first."""
    return [
        {
            "run": run.record.run_id,
            "attempt": attempt.number,
            "source": attempt.log_name,
            "text": "\n".join(attempt.log),
        }
        for run in runs
        for attempt in run.attempts
        if attempt.log
    ]


def clock_text(seconds: float) -> str:
    """A time as ``2026-11-27 03:11:32``, in the local time of this machine."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _amount(number: float) -> str:
    """Two digits at least: ``0.012``, ``4.1``, ``12``, ``2,055``."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"

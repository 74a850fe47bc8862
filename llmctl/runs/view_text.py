"""A run in words: the cells, the reason and the colour that every screen of runs shows. Pure."""

from collections.abc import Iterator

from llmctl.durations import short_duration
from llmctl.job_state import JobState
from llmctl.runs.costs.words import cost_lines
from llmctl.runs.number_text import iteration_time_text, loss_text, memory_text, rate_text, sparkline
from llmctl.runs.record import PredictedStep
from llmctl.runs.view import RunView
from llmctl.terminal_text import printable

COLUMNS = ("RUN", "CLUSTER", "STATE", "TRY", "ITERATION", "LOSS", "TOKENS/S", "MFU", "ETA", "AGE")
FIRST_NUMBER = COLUMNS.index("ITERATION")
"""The first of the columns with numbers, which are aligned to the right."""
_COLOURS = {
    JobState.PENDING: "yellow",
    JobState.RUNNING: "cyan",
    JobState.COMPLETED: "green",
    JobState.CANCELLED: "magenta",
    JobState.UNKNOWN: "yellow",
}


def colour(state: JobState) -> str:
    """The colour of a state, by its name in every terminal; red for a bad end."""
    return _COLOURS.get(state, "red")


def cells(view: RunView) -> list[str]:
    """The short values of a run, one for each column; ``-`` where there is nothing."""
    total = f"/{view.train_iters}" if view.train_iters is not None else ""
    return [
        printable(view.run_id),
        printable(view.cluster),
        view.state.value,
        str(view.attempt) if view.attempt is not None else "-",
        f"{view.iteration}{total}" if view.iteration is not None else f"-{total}",
        loss_text(view.loss) if view.loss is not None else "-",
        rate_text(view.tokens_per_s) if view.tokens_per_s is not None else "-",
        f"{100 * view.mfu:.1f}%" if view.mfu is not None else "-",
        short_duration(view.eta_s) if view.eta_s is not None else "-",
        short_duration(view.metrics_age_s) if view.metrics_age_s is not None else "-",
    ]


def reason(view: RunView) -> str:
    """The reason without the words that stand in the columns already."""
    if view.detail == f"{view.state} at iteration {view.iteration}":
        return ""
    words = view.detail.removeprefix(view.state.value)
    return words.lstrip(" ;:,") if words[:1] in (" ", ";", ":", ",") else view.detail


def one_line(words: str) -> str:
    """Words without escape sequences and without line ends."""
    return " ".join(printable(words).split())


def _predicted_text(view: RunView, predicted: PredictedStep) -> str:
    """The prediction at the submission, and by how much the run differs."""
    pairs = (
        (f"{iteration_time_text(predicted.iteration_time_s)} per iteration", predicted.iteration_time_s),
        (f"{memory_text(predicted.peak_memory_bytes)} on {predicted.device}", predicted.peak_memory_bytes),
    )
    measured = (view.iteration_time_s, view.peak_memory_bytes)
    parts = []
    for (words, before), found in zip(pairs, measured, strict=True):
        parts.append(words if not found or not before else f"{words} (measured {100 * (found / before - 1):+.0f}%)")
    return ", ".join(parts)


def page_rows(view: RunView, encoding: str | None) -> Iterator[tuple[str, str]]:
    """Names and lines about one run: what it does now, its pace, and the recent past of its metrics."""
    if view.phase is not None and view.phase != view.detail:
        yield "phase", printable(view.phase)
    pace = [f"{iteration_time_text(view.iteration_time_s)} per iteration"] if view.iteration_time_s is not None else []
    left = [f"{short_duration(view.eta_s)} left"] if view.eta_s is not None else []
    if pace:
        yield "rate", ", ".join([*pace, *left])
    if view.predicted is not None:
        yield "predicted", _predicted_text(view, view.predicted)
    save = view.save
    if save is not None:
        speed = f" ({memory_text(save.bytes / save.written_s)}/s)" if save.written_s > 0 else ""
        yield (
            "save",
            f"iteration {save.iteration}, {memory_text(save.bytes)} in {save.written_s:.1f} s{speed}, "
            f"blocked {save.blocked_s:.1f} s",
        )
    if view.costs is not None:
        yield from cost_lines(view.costs)
    recent = view.recent
    if recent is None:
        return
    trends = {
        "loss": (recent.loss, loss_text, "from {first} to {last}"),
        "tokens/s": (recent.tokens_per_s, rate_text, "{low} to {high}"),
        "memory": (recent.peak_memory_bytes, memory_text, "{low} to {high}"),
    }
    lines = {name: sparkline(values, encoding=encoding) for name, (values, _, _) in trends.items()}
    if any(lines.values()):
        yield "iterations", f"{recent.first_iteration} to {recent.iteration[-1]}"
    for name, (values, text, form) in trends.items():
        known = [value for value in values if value is not None]
        if lines[name]:
            ends = {"first": known[0], "last": known[-1], "low": min(known), "high": max(known)}
            yield name, f"{lines[name]}  " + form.format(**{key: text(value) for key, value in ends.items()})

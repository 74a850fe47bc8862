"""Tools that read runs: their list, states, output and numbers."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from llmctl.api.call import calling
from llmctl.api.running import Run
from llmctl.errors import RecordError, WaitTimeout
from llmctl.mcp_server.tool import Answer, Arguments, Tool
from llmctl.operate.history import find_runs, with_costs
from llmctl.operate.survey import RunSurvey, choose_entries
from llmctl.runs.index import IndexEntry
from llmctl.runs.view import RunView
from llmctl.terminal_text import printable

MOST_LINES = 1000
MOST_LINE_CHARACTERS = 100_000
"""Of the output of a run in one answer: the last."""
MOST_POINTS = 1000
MOST_VALUES = 10_000
"""Numbers of all columns together."""

RunName = Annotated[str, Field(description="Run id, its beginning, run name or job id.", min_length=1)]


class RunsArguments(Arguments):
    """Filters of ``llmctl list``."""

    cluster: str | None = Field(None, description="Only of this cluster.")
    state: str | None = Field(None, description="Only in this state, such as failed, running or completed.")
    name: str | None = Field(None, description="Only runs whose id contains this text.")
    since: str | None = Field(None, description="Only runs created within this time, such as 7d.")
    most: int = Field(20, ge=1, le=100, description="Number of runs, the newest first.")


def list_runs(asked: RunsArguments) -> Answer:
    """Runs as ``llmctl list --json`` has them."""
    with calling("llmctl.mcp.runs") as call:
        found, more = find_runs(call.context, **asked.model_dump())
    text = "\n".join(f"{run.run_id} on {run.view.cluster}: {printable(run.view.summary)}" for run in found)
    return Answer(text or "there are no such runs", {"runs": [run.as_json() for run in found], "more": more})


class StatusArguments(Arguments):
    """Runs of ``llmctl status``."""

    runs: list[RunName] = Field(
        [], max_length=20, description="Runs by id, name or job id. Empty: those that have not ended, and the latest."
    )


def status(asked: StatusArguments) -> Answer:
    """Views of runs as ``llmctl status --json`` has them."""
    with calling("llmctl.mcp.status") as call:
        index, survey = call.context.index, RunSurvey(call.context)
        if asked.runs:
            entries, more = list(dict.fromkeys(index.find(name) for name in asked.runs)), 0
        else:
            entries, more = choose_entries(index.entries(), every=False)
        views = survey.look(entries, remember=not asked.runs)
        if entries and survey.unreachable.keys() == {entry.cluster for entry in entries}:
            raise next(iter(survey.unreachable.values()))
        if asked.runs:
            views = [with_costs(call.context, *pair) for pair in zip(entries, views, strict=True)]
    return _views(views, entries, more)


def _views(views: Sequence[RunView], entries: Sequence[IndexEntry], more: int) -> Answer:
    text = "\n".join(f"{view.run_id}: {printable(view.summary)}" for view in views)
    found = [{**view.as_json(), "run_dir": str(entry.run_dir)} for view, entry in zip(views, entries, strict=True)]
    return Answer(text or "there are no runs yet", {"runs": found, "more": more})


class WaitArguments(Arguments):
    """A run, and a time."""

    run: RunName
    timeout_s: float = Field(60, ge=0, le=300, description="Seconds to wait at most; then call again.")


def wait(asked: WaitArguments) -> Answer:
    """The state of a run once it has ended, or after some time."""
    run = Run(asked.run)
    try:
        view = run.wait(asked.timeout_s, check=False)
    except WaitTimeout:
        view = run.status()
    document = {**view.as_json(), "run_dir": str(run.run_dir), "has_ended": view.state.is_finished}
    return Answer(f"{view.run_id}: {printable(view.summary)}", document)


class LogsArguments(Arguments):
    """A run, and the part of its output."""

    run: RunName
    rank: int | str | None = Field(
        None,
        description=(
            "A rank, several (0,3), all, or failed: the output of the ranks that failed, the first with its traceback. "
            "Unset: rank 0, and before its first line the output of the job."
        ),
    )
    job: bool = Field(False, description="The output of the job script and its agents instead.")
    lines: int | None = Field(
        None, ge=1, le=MOST_LINES, description="Last lines of each file. Unset: 100, or 20 of each of several files."
    )
    attempt: int | None = Field(None, ge=1, description="Number of the attempt. Unset: the last.")


def logs(asked: LogsArguments) -> Answer:
    """The last lines of the output of a run."""
    run = Run(asked.run)
    lines = run.logs(asked.rank, job=asked.job, lines=asked.lines, attempt=asked.attempt)
    kept: list[str] = []
    left = MOST_LINE_CHARACTERS
    for line in map(printable, reversed(lines[-MOST_LINES:])):
        left -= len(line) + 1
        if left < 0:
            if not kept:
                kept.append(line[-MOST_LINE_CHARACTERS:])
            break
        kept.append(line)
    kept.reverse()
    document = {"run_id": run.run_id, "lines": kept, "left_out": len(lines) - len(kept)}
    return Answer(f"{run.run_id}: {len(kept)} lines", document)


class MetricsArguments(Arguments):
    """A run, and columns of its metrics."""

    run: RunName
    keys: list[str] = Field(
        ["lm_loss"], min_length=1, max_length=100, description="Keys of metrics.jsonl, or patterns such as *_loss or *."
    )
    points: int = Field(
        100, ge=1, le=MOST_POINTS, description="Rows at most, spread evenly; the last row is always there."
    )
    validation: bool = Field(False, description="Rows of validations instead of those of training.")


def metrics(asked: MetricsArguments) -> Answer:
    """Columns of the metrics of a run, with a bounded number of rows."""
    run = Run(asked.run)
    columns = run.metrics(*asked.keys, validation=asked.validation)
    rows = len(columns["iteration"])
    lacking = [key for key in asked.keys if key not in columns and not set(key) & set("*?[")]
    if rows and lacking:
        there = ", ".join(run.metrics("*", validation=asked.validation))
        raise RecordError(f"{run.run_id}: no row has a number {', '.join(map(repr, lacking))}; the numbers are {there}")
    count = max(1, min(asked.points, MOST_VALUES // len(columns)))
    kept = _spread(rows, count)
    document: dict[str, Any] = {
        "run_id": run.run_id,
        "rows": rows,
        "columns": {key: [column[row] for row in kept] for key, column in columns.items()},
    }
    return Answer(f"{run.run_id}: {len(kept)} of {rows} rows of {', '.join(columns)}", document)


def _spread(rows: int, count: int) -> list[int]:
    """Numbers of rows, evenly spread, the last among them."""
    if rows <= count:
        return list(range(rows))
    return [(number + 1) * rows // count - 1 for number in range(count)]


TOOLS = (
    Tool(
        "runs",
        "List past and present runs, the newest first: state, iteration, loss, exit code, reason, node-hours, cost.",
        RunsArguments,
        list_runs,
    ),
    Tool(
        "status",
        "State of runs: iteration, loss, tokens/s, time left, the reason of a failure (detail), exit code. Contacts "
        "their clusters.",
        StatusArguments,
        status,
    ),
    Tool("wait", "Wait until a run has ended, or for some time; returns its state.", WaitArguments, wait),
    Tool(
        "logs",
        "Last lines of the output of a run. rank=failed shows the cause of a failure; messages name the first rank.",
        LogsArguments,
        logs,
    ),
    Tool(
        "metrics",
        "Numbers of a run by column, a row for each logged iteration: lm_loss, grad_norm, tokens_per_s, ...",
        MetricsArguments,
        metrics,
    ),
)

"""``llmctl status``: the state of runs, for people, pipes and programs."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from llmctl.cli.completion import complete_cluster, complete_run
from llmctl.cli.console import is_for_people, print_json, rich_console
from llmctl.context import Context, say
from llmctl.errors import SchedulerError, UsageError
from llmctl.operate.history import with_costs
from llmctl.operate.survey import RunSurvey, choose_entries
from llmctl.runs.index import IndexEntry
from llmctl.runs.scheduler_query import INTERVAL_S
from llmctl.runs.view import RunView
from llmctl.runs.view_text import COLUMNS, FIRST_NUMBER, cells, colour, one_line, page_rows, reason
from llmctl.terminal_text import printable

if TYPE_CHECKING:
    from rich.console import Console, Group

WATCH_INTERVAL_S = 2.0
"""Seconds between two reads of the runs' files."""
DETAIL_WIDTH = 160
"""Characters of a reason beside other runs; the page of one run has all of it."""
PAGE = 100
"""Runs of ``--all`` at a time: somebody reads them, and each costs reads of the cluster's file system."""
WIDE = 100
"""Terminal width, in columns, from which the table has wide spacing."""

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def status(
    ctx: typer.Context,
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="Run id, its beginning, run name or job id.", autocompletion=complete_run),
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Only this cluster; also searches its runs_root.", autocompletion=complete_cluster
        ),
    ] = "",
    every: bool = typer.Option(False, "--all", help="Include runs that ended long ago."),
    page: Annotated[
        int | None,
        typer.Option("--page", metavar="K", min=1, help=f"With --all: the K-th {PAGE} runs, newest first."),
    ] = None,
    watch: bool = typer.Option(False, "--watch", help="Refresh every two seconds until all runs have ended."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Show runs: state, iteration, loss, tokens/s, MFU, time left, age of the metrics.

    Without RUN: all runs that have not ended, and the latest that have. With one RUN: also its costs and recent past.
    """
    if watch and as_json:
        raise UsageError("--watch: --json prints only one document; leave out one of the two")
    if page is not None and (not every or runs):
        raise UsageError("--page: only --all has pages; give --all, and no RUN")
    context: Context = ctx.obj
    entries, more = _select(context, runs or [], cluster, every)
    older = 0
    # A program gets all of them in one document, unless it asks for pages.
    if every and not runs and (page is not None or not as_json):
        entries, older = _turn_to(entries, page or 1)
    survey = RunSurvey(context, interval_s=INTERVAL_S if watch else 0.0)
    if watch:
        _watch(survey, entries, is_named=bool(runs))
    else:
        views = _look(survey, entries, is_named=bool(runs))
        if as_json:
            print_json({"runs": [_document(*pair) for pair in zip(views, entries, strict=True)], "more": more + older})
        else:
            _show(views, is_named=bool(runs))
        if not entries and not as_json:
            say("no runs yet: llmctl submit starts one; llmctl status --cluster NAME searches for older ones")
    if more and not as_json:
        say(f"{more} more ended runs: llmctl status --all")
    if older and not as_json:
        say(f"{older:,} older runs: llmctl status --all --page {(page or 1) + 1}")
    if entries and survey.unreachable.keys() == {entry.cluster for entry in entries}:
        raise next(iter(survey.unreachable.values()))


def _look(survey: RunSurvey, entries: Sequence[IndexEntry], *, is_named: bool) -> list[RunView]:
    """The views of runs; of those that a user has named, with the costs of their attempts."""
    views = survey.look(entries, remember=not is_named)
    if not is_named:
        return views
    return [with_costs(survey.context, *pair) for pair in zip(entries, views, strict=True)]


def _select(context: Context, references: Sequence[str], cluster: str, every: bool) -> tuple[list[IndexEntry], int]:
    """The runs to show, newest first, and the number of hidden runs."""
    if cluster:
        profile = context.profile(cluster)
        try:
            _, unread = context.index.rebuild(Path(context.runs_root(profile)), context.connect(profile))
            if unread:
                whose = "they may be other users', or of a newer llmctl"
                say(f"{cluster}: {unread} runs cannot be read and are left out; {whose}")
        except SchedulerError as error:
            say(f"{cluster}: cannot search its runs_root: {error.message}")
    if references:
        found = [context.index.find(reference) for reference in references]
        return list(dict.fromkeys(entry for entry in found if cluster in ("", entry.cluster))), 0
    return choose_entries([entry for entry in context.index.entries() if cluster in ("", entry.cluster)], every=every)


def _turn_to(entries: list[IndexEntry], page: int) -> tuple[list[IndexEntry], int]:
    """The runs of one page, and the number of those on later ones."""
    pages = max(1, -(-len(entries) // PAGE))
    if page > pages:
        raise UsageError(f"--page: {page} is past the last page, {pages}")
    end = page * PAGE
    return entries[end - PAGE : end], max(0, len(entries) - end)


class RunPlace(TypedDict):
    """Beside the fields of RunView."""

    run_dir: str
    """Directory of the run, on the cluster."""


def _document(view: RunView, entry: IndexEntry) -> dict[str, Any]:
    place: RunPlace = {"run_dir": str(entry.run_dir)}
    return {**view.as_json(), **place}


def _page(view: RunView, encoding: str | None) -> list[str]:
    """Lines about one run: what it does now, its pace, and the recent past of its metrics."""
    return [f"{name:<12}{text}" for name, text in page_rows(view, encoding)]


def _shortened(view: RunView, words: str, *, is_alone: bool) -> str:
    """The words on one line; beside other runs, only their beginning."""
    line = one_line(words)
    if is_alone or len(line) <= DETAIL_WIDTH:
        return line
    return f"{line[:DETAIL_WIDTH].rstrip()}... (all of it: llmctl status {printable(view.run_id)})"


def _show(views: Sequence[RunView], *, is_named: bool) -> None:
    if not views:
        return
    if is_for_people():
        console = rich_console()
        console.print(_table(views, console, is_named=is_named))
        return
    is_alone = len(views) == 1
    reasons = [_shortened(view, reason(view), is_alone=is_alone) for view in views]
    rows = [[*COLUMNS, "DETAIL"], *([*cells(view), why or "-"] for view, why in zip(views, reasons, strict=True))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]))
    for line in _page(views[0], sys.stdout.encoding) if is_named and is_alone else ():
        print(line)


def _table(views: Sequence[RunView], console: "Console", *, is_named: bool) -> "Group":
    """Table of the short values, for a terminal. Details follow below, one line per run; the page of one run last."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = [cells(view) for view in views]
    # Empty columns, and the cluster if there is only one, are left out to save width.
    empty = {number for number in range(len(COLUMNS)) if {row[number] for row in rows} <= {"-"}}
    if len({view.cluster for view in views}) < 2:
        empty.add(COLUMNS.index("CLUSTER"))
    shown = [number for number in range(len(COLUMNS)) if number not in empty]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2 if console.width >= WIDE else 1, 0, 0))
    for number in shown:
        right = number >= FIRST_NUMBER
        table.add_column(COLUMNS[number], justify="right" if right else "left", no_wrap=True)
    for view, row in zip(views, rows, strict=True):
        texts = [Text(cell) for cell in row]
        texts[COLUMNS.index("STATE")].stylize(colour(view.state))
        table.add_row(*(texts[number] for number in shown))
    details = []
    for view in views:
        if reason(view):
            words = Text(_shortened(view, view.summary, is_alone=len(views) == 1))
            words.stylize(colour(view.state), 0, len(view.state.value))
            details.append(Text.assemble((printable(view.run_id), "bold"), " ", words))
    page = _page(views[0], console.encoding) if is_named and len(views) == 1 else ()
    return Group(table, *details, *map(Text, page))


def _watch(survey: RunSurvey, entries: Sequence[IndexEntry], *, is_named: bool) -> None:
    views = survey.look(entries, remember=not is_named)
    if not is_for_people():
        _show(views, is_named=is_named)
        while not all(view.state.is_finished for view in views):
            print(flush=True)
            time.sleep(WATCH_INTERVAL_S)
            views = survey.look(entries, remember=not is_named)
            _show(views, is_named=is_named)
        return
    from rich.live import Live

    console = rich_console()
    with Live(_table(views, console, is_named=is_named), console=console, auto_refresh=False) as live:
        while not all(view.state.is_finished for view in views):
            time.sleep(WATCH_INTERVAL_S)
            views = survey.look(entries, remember=not is_named)
            live.update(_table(views, console, is_named=is_named), refresh=True)

"""``llmctl list``: past and present runs, filtered, with what they cost."""

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from llmctl.cli.completion import complete_cluster
from llmctl.cli.console import is_for_people, print_json, rich_console
from llmctl.context import Context, say
from llmctl.terminal_text import printable

if TYPE_CHECKING:
    from llmctl.operate.history import PastRun

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_COLUMNS = ("RUN", "CLUSTER", "STATE", "ITERATION", "LOSS", "CREATED", "NODES", "NODE-HOURS", "COST")
_NEWEST = 20


@app.command("list")
def list_runs(
    ctx: typer.Context,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this cluster.", autocompletion=complete_cluster)
    ] = None,
    state: Annotated[str | None, typer.Option(metavar="STATE", help="Only runs in this state.")] = None,
    name: Annotated[str | None, typer.Option(metavar="TEXT", help="Only runs whose id contains this text.")] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="Only runs created within, such as 7d.")] = None,
    most: Annotated[int, typer.Option("--most", "-n", metavar="N", min=1, help="Number of runs.")] = _NEWEST,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """List runs, the newest first, with node-hours and cost, and their sum."""
    from llmctl.operate.history import find_runs

    context: Context = ctx.obj
    found, hidden = find_runs(context, cluster=cluster, state=state, name=name, since=since, most=most)
    if as_json:
        print_json({"runs": [run.as_json() for run in found], "more": hidden})
        return 0
    _show(found)
    if not found:
        say("there are no such runs" if cluster or state or name or since else "no runs yet: llmctl submit starts one")
    elif len(found) > 1 and (total := _total(found)):
        say(total)
    if hidden:
        say(f"{hidden} more: llmctl list -n {hidden + len(found)}")
    return 0


def _total(runs: list["PastRun"]) -> str:
    hours = [run.node_hours for run in runs if run.node_hours is not None]
    points: dict[str, float] = {}
    for run in runs:
        if run.points is not None:
            points[run.unit] = points.get(run.unit, 0.0) + run.points
    parts = [f"{sum(hours):,.2f} node-hours"] if hours else []
    return f"{len(runs)} runs: " + ", ".join(parts + [f"{sum_:,.1f} {unit}" for unit, sum_ in points.items()])


def _cells(run: "PastRun") -> list[str]:
    view = run.view
    total = f"/{view.train_iters}" if view.train_iters is not None else ""
    created = datetime.fromtimestamp(run.entry.created).astimezone()
    return [
        printable(view.run_id),
        printable(view.cluster),
        view.state.value,
        f"{view.iteration}{total}" if view.iteration is not None else "-",
        f"{view.loss:.4f}" if view.loss is not None else "-",
        created.strftime("%Y-%m-%d %H:%M"),
        str(run.nodes) if run.nodes is not None else "-",
        f"{run.node_hours:.2f}" if run.node_hours is not None else "-",
        f"{run.points:,.1f} {run.unit}" if run.points is not None else "-",
    ]


def _show(runs: list["PastRun"]) -> None:
    if not runs:
        return
    rows = [_cells(run) for run in runs]
    shown = [number for number in range(len(_COLUMNS)) if {row[number] for row in rows} != {"-"}]
    if not is_for_people():
        lines = [list(_COLUMNS), *rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
        for line in lines:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number in shown:
        table.add_column(_COLUMNS[number], justify="left" if number < 3 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[number] for number in shown))
    rich_console().print(table)

"""``llmctl nodes``: the nodes of a cluster, with their states and reasons."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from llmctl.backends.base import NodeReport
from llmctl.cli.completion import complete_cluster
from llmctl.cli.console import is_for_people, print_json, rich_console
from llmctl.context import ClusterSession, Context, say
from llmctl.operate.nodes import NodeGroup, QueueSummary, group_nodes, read_nodes, summarize
from llmctl.terminal_text import printable

COLUMNS = ("QUEUES", "STATE", "NODES", "GPUS", "CORES", "MEMORY", "NAMES", "REASON")
COLOURS = {"idle": "green", "mixed": "cyan", "allocated": "blue", "draining": "yellow", "drained": "yellow"}

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@dataclass(frozen=True)
class NodesDocument:
    """The document of ``--json``.

    Attributes:
        cluster: name of the profile.
        nodes: the nodes, in order of name.
        queues: counts of each queue.
    """

    cluster: str
    nodes: Sequence[NodeReport]
    queues: Sequence[QueueSummary]


@app.command()
def nodes(
    ctx: typer.Context,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Cluster. Default: as for submit.", autocompletion=complete_cluster),
    ] = None,
    excluded: Annotated[
        bool, typer.Option("--excluded", help="Show your list of bad nodes instead: what submit and resume leave out.")
    ] = False,
    readmit: Annotated[
        str | None, typer.Option("--readmit", metavar="NODE", help="Take a node off your list of bad nodes.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show a cluster's nodes: state with its reason, GPUs and cores in use, memory.

    GPUS and CORES show used/total.
    """
    context: Context = ctx.obj
    name, origin = context.cluster(cluster)
    session = ClusterSession.of(context, name, origin)
    if readmit is not None:
        from llmctl.operate.bad_nodes import readmit_node

        readmit_node(context, session, readmit)
        say(f"{readmit} is off the list of bad nodes of {name}")
    if excluded or readmit is not None:
        from llmctl.cli.viewing.bad_nodes import show_bad_nodes

        show_bad_nodes(context, session, as_json=as_json)
        return
    found = read_nodes(session)
    if as_json:
        print_json(asdict(NodesDocument(name, found, summarize(found))))
        return
    if not found:
        say(f"{name}: the scheduler lists no nodes")
        return
    _show(group_nodes(found))
    for summary in summarize(found):
        print(printable(_sentence(summary)))


def _show(groups: Sequence[NodeGroup]) -> None:
    rows = [[printable(cell) for cell in _cells(group)] for group in groups]
    # Columns without any value are left out to save width.
    shown = [number for number in range(len(COLUMNS)) if {row[number] for row in rows} != {"-"}]
    if is_for_people():
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for number in shown:
            table.add_column(COLUMNS[number], overflow="fold")
        for group, row in zip(groups, rows, strict=True):
            cells = [Text(cell) for cell in row]
            cells[COLUMNS.index("STATE")].stylize(COLOURS.get(group.nodes[0].state, "red"))
            table.add_row(*(cells[number] for number in shown))
        rich_console().print(table)
        return
    lines = [[COLUMNS[number] for number in shown], *([row[number] for number in shown] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(shown))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cells(group: NodeGroup) -> list[str]:
    first = group.nodes[0]
    return [
        ",".join(first.queues) or "-",
        first.state if first.state != "unknown" else f"unknown: {first.raw}",
        str(len(group.nodes)),
        _share([(node.gpus_used, node.gpus) for node in group.nodes]),
        _share([(node.cores_used, node.cores) for node in group.nodes]),
        f"{first.memory_gib:g} GiB" if first.memory_gib is not None else "-",
        group.names,
        _reason(first) or "-",
    ]


def _reason(node: NodeReport) -> str:
    if node.reason:
        return node.reason
    return node.raw if node.state == "down" else ""


def _share(pairs: Sequence[tuple[int | None, int | None]]) -> str:
    """``3/32``, used and total; ``32`` if the use is unknown."""
    totals = [total for _, total in pairs if total is not None]
    used = [count for count, _ in pairs if count is not None]
    if not sum(totals):
        return "-"
    return f"{sum(used)}/{sum(totals)}" if len(used) == len(pairs) else str(sum(totals))


def _sentence(summary: QueueSummary) -> str:
    states = ", ".join(f"{count} {state}" for state, count in summary.states.items())
    words = f"{summary.nodes} node{'s' if summary.nodes > 1 else ''}: {states}"
    if summary.gpus:
        used = f"{summary.gpus_used} of {summary.gpus} GPUs in use" if summary.gpus_used is not None else ""
        free = f"{summary.gpus_idle} available" if summary.gpus_idle is not None else ""
        words += "; " + (", ".join(part for part in (used, free) if part) or f"{summary.gpus} GPUs")
    return f"{summary.queue}: {words}" if summary.queue else words

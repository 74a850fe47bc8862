"""``llmctl watch``: a live screen of runs."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from llmctl.cli.completion import complete_cluster, complete_run
from llmctl.context import Context
from llmctl.errors import UsageError

if TYPE_CHECKING:
    from llmctl.watch.source import RunSource

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def watch(
    ctx: typer.Context,
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="Run id, its beginning, run name or job id.", autocompletion=complete_run),
    ] = None,
    cluster: Annotated[
        str, typer.Option(metavar="NAME", help="Only this cluster.", autocompletion=complete_cluster)
    ] = "",
    demo: bool = typer.Option(False, "--demo", help="Show made-up runs; needs no cluster, and writes nothing."),
) -> int:
    """Show runs on a live screen: state, loss curve, ranks, nodes, attempts and log.

    Without RUN: all runs that have not ended, and the latest that have. The keys are at the bottom of the screen.
    """
    context: Context = ctx.obj
    if demo and (runs or cluster):
        raise UsageError("--demo: shows made-up runs only; leave out RUN and --cluster")
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()
    if not is_terminal or context.environment.get("TERM", "dumb") == "dumb":
        raise UsageError("watch: needs a terminal; elsewhere, llmctl status --watch prints the states again and again")
    source, first = _source(context, runs or [], cluster, demo=demo)
    from llmctl.watch.app import WatchApp
    from llmctl.watch.source import Watching

    screen = WatchApp(Watching(source, sys.stdout.encoding), first)
    screen.run()
    return screen.return_code or 0


def _source(context: Context, references: list[str], cluster: str, *, demo: bool) -> tuple["RunSource", str | None]:
    """The source of the screen, and the run that it opens at once."""
    if demo:
        from llmctl.watch.demo import DemoRuns

        return DemoRuns(), None
    from llmctl.watch.clusters import ClusterRuns

    found = ClusterRuns(context, references, cluster)
    found.connect()
    return found, found.only_run

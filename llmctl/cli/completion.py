"""Shell completion of flags and arguments. Reads two folders; queries no scheduler."""

import typer

from llmctl.context import Context

MOST_RUNS = 50
"""Most runs that a completion offers: nobody reads more, and each costs a read of a file."""


def complete_cluster(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of clusters with a profile."""
    from llmctl.site.profile_names import cluster_names

    context: Context = ctx.obj
    return [name for name in cluster_names(context.folders) if name.startswith(incomplete)]


def complete_run(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """The latest run ids, newest first, with the state last seen."""
    context: Context = ctx.obj
    return [(entry.run_id, entry.last_state or "") for entry in context.index.beginning_with(incomplete, MOST_RUNS)]

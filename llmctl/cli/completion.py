"""Shell completion of flags and arguments. Reads two folders; queries no scheduler."""

import typer

from llmctl.context import Context


def complete_cluster(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of clusters with a profile."""
    from llmctl.site.profile_names import cluster_names

    context: Context = ctx.obj
    return [name for name in cluster_names(context.folders) if name.startswith(incomplete)]


def complete_run(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Run ids, newest first, with the state last seen."""
    context: Context = ctx.obj
    entries = context.index.entries()[::-1]
    return [(entry.run_id, entry.last_state or "") for entry in entries if entry.run_id.startswith(incomplete)]

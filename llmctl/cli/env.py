"""``llmctl env kernels``: build or inspect the kernels of a cluster's jobs."""

from typing import Annotated

import typer

from llmctl.cli.completion import complete_cluster
from llmctl.context import Context
from llmctl.errors import UsageError

app = typer.Typer(rich_markup_mode=None, add_completion=False)

ACTIONS = ("doctor", "build")


@app.callback()
def env() -> None:
    """Build and inspect the software of jobs."""


@app.command()
def kernels(
    ctx: typer.Context,
    action: Annotated[str, typer.Argument(metavar="doctor|build", help="Action.")] = "doctor",
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Cluster. Default: as for submit.", autocompletion=complete_cluster),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With doctor: print one JSON document.")] = False,
) -> int:
    """Report the backend of every op (doctor), or compile (build).

    Training compiles the kernels itself, once. For compute nodes without a compiler, build compiles them beforehand, on
    the node that submits jobs, with the jobs' Python and into the jobs' cache.
    """
    if action not in ACTIONS:
        raise UsageError(f"{action!r}: llmctl env kernels takes {' or '.join(ACTIONS)}")
    if as_json and action == "build":
        raise UsageError(f"--json: {action} prints no document; leave --json out")
    from llmctl.operate.trainer_command import run_kernels_command

    context: Context = ctx.obj
    profile = context.profile(*context.cluster(cluster))
    return run_kernels_command(context, profile, [action, *(["--json"] if as_json else [])])

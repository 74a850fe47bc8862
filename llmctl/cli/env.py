"""``llmctl env kernels``: the fused kernels of a cluster's jobs, built beforehand or examined."""

from typing import Annotated

import typer

from llmctl.cli.completion import complete_cluster
from llmctl.context import Context
from llmctl.errors import UsageError

app = typer.Typer(rich_markup_mode=None, add_completion=False)

ACTIONS = ("doctor", "build", "bench")


@app.callback()
def env() -> None:
    """Prepare and examine the software that jobs run on."""


@app.command()
def kernels(
    ctx: typer.Context,
    action: Annotated[str, typer.Argument(metavar="doctor|build|bench", help="What to do.")] = "doctor",
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The cluster. Default: as for submit.", autocompletion=complete_cluster),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With doctor or bench: print one JSON document.")] = False,
) -> int:
    """Fused kernels: say what every operation runs on and why (doctor), compile (build), or measure them (bench).

    Training compiles them by itself, once; build does it beforehand, on the node that jobs are submitted from, for
    compute nodes without a compiler. It goes by the jobs' own Python and into the cache that they use.
    """
    if action not in ACTIONS:
        raise UsageError(f"{action!r}: llmctl env kernels does {', '.join(ACTIONS[:-1])} or {ACTIONS[-1]}")
    if as_json and action == "build":
        raise UsageError(f"--json: {action} prints no document; leave it out")
    from llmctl.operate.trainer_command import run_kernels_command

    context: Context = ctx.obj
    profile = context.profile(*context.cluster(cluster))
    return run_kernels_command(context, profile, [action, *(["--json"] if as_json else [])])

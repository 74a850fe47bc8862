"""``llmctl env``: build the environment of a cluster's jobs; build or inspect their kernels."""

from typing import Annotated

import typer

from llmctl.cli.completion import complete_cluster
from llmctl.cli.trainer.trainer_job import Group, Queue, Time, value
from llmctl.context import Context
from llmctl.errors import UsageError

app = typer.Typer(rich_markup_mode=None, add_completion=False)

ACTIONS = ("doctor", "build")
_ResourceType = Annotated[str | None, value("TYPE", "Kind of node that compiles. Default: the profile's.")]


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


@app.command()
def build(
    ctx: typer.Context,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Cluster. Default: as for submit.", autocompletion=complete_cluster),
    ] = None,
    path: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="The environment's folder. Default: the profile's.")
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Interpreter that makes it. Default: the profile's, else python3."),
    ] = None,
    torch: Annotated[str | None, typer.Option(metavar="VERSION", help="Version of torch. Default: the newest.")] = None,
    index_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Index of torch's wheels. Default: by the nodes' GPUs.")
    ] = None,
    find_links: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Folder of wheels on the cluster, in place of every package index."),
    ] = None,
    packages: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="NAME[,NAME]",
            help="Compile too: apex, flash-attn, transformer-engine (each with @TAG), or the path of an sdist.",
        ),
    ] = None,
    resource_type: _ResourceType = None,
    queue: Queue = None,
    time: Time = None,
    group: Group = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the steps and commands; change nothing.")] = False,
) -> int:
    """Build the virtual environment of a cluster's jobs: torch for its GPUs, and llmctl.

    Packages of --with are compiled in a job on a node of the cluster, once for each Python, torch and CUDA.
    Each finished step is recorded in the folder. The same command again goes on after the last one; a changed input
    repeats its step and those after it.
    """
    from llmctl.operate.environment.build import build_environment
    from llmctl.operate.environment.decide import Asked, plan_environment
    from llmctl.operate.environment.plan import plan_lines

    context: Context = ctx.obj
    asked = Asked(
        path=path,
        python=python,
        torch=torch,
        index_url=index_url,
        find_links=find_links,
        packages=tuple(filter(None, (packages or "").split(","))),
        job={"resource_type": resource_type, "queue": queue, "time": time, "group": group},
    )
    plan = plan_environment(context, cluster, asked, dry_run=dry_run)
    if dry_run:
        print("\n".join(plan_lines(plan)))
        return 0
    code = build_environment(plan)
    if code == 0:
        print(plan.wanted.own_python)
    return code

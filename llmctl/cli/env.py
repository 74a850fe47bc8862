"""``llmctl env``: build the environment of a cluster's jobs, build or inspect their kernels, measure the hardware."""

from typing import Annotated

import typer

from llmctl.cli.completion import complete_cluster
from llmctl.cli.trainer.trainer_job import Group, Queue, Time, value
from llmctl.context import Context
from llmctl.errors import UsageError
from llmctl.terminal_text import printable

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


@app.command()
def bench(
    ctx: typer.Context,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Cluster. Default: as for submit.", autocompletion=complete_cluster),
    ] = None,
    nodes: Annotated[
        int | None, value("N", "Number of nodes. Default: 2, for messages between nodes; 1 on this machine.")
    ] = None,
    gpus_per_node: Annotated[
        int | None, value("N", "GPUs of each node, or ranks of a node without GPUs. Default: all GPUs, or 1 rank.")
    ] = None,
    resource_type: Annotated[str | None, value("TYPE", "Kind of node. Default: the profile's.")] = None,
    queue: Queue = None,
    time: Time = None,
    group: Group = None,
    again: Annotated[bool, typer.Option("--again", help="Measure anew, whatever was measured before.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan of the job; submit nothing.")] = False,
    script: Annotated[
        bool, typer.Option("--show-script", help="Print script and submit command; submit nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Measure the hardware of a cluster in a short job, and keep the result on this machine.

    Measured are matrix products, attention, memory, starts of operations, and messages within a node and between nodes.
    The job is a run. After Ctrl-C it goes on, and the same command comes back to it, or to its result.
    """
    from llmctl.operate.environment.bench import Bench, known_result, measure_cluster, plan_bench

    context: Context = ctx.obj
    given = {
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        "resource_type": resource_type,
        "queue": queue,
        "time": time,
        "group": group,
    }
    asked = Bench(context, *context.cluster(cluster), given)
    if dry_run or script:
        from llmctl.cli.submit import Display, show_plan

        show_plan(plan_bench(asked, dry_run=True), context, Display(dry_run, script, as_json=as_json))
        return 0
    document = None if again else known_result(asked)
    if document is not None:
        context.tell(f"measured by {document['run_id']} before; --again measures anew")
    else:
        found = measure_cluster(asked, again=again)
        if isinstance(found, int):
            return found
        document = found
    if as_json:
        from llmctl.cli.console import print_json

        print_json(document)
        return 0
    from llmctl.operate.environment.bench_table import data_sheet, table_lines

    sheet = data_sheet(document, context.profile(asked.cluster, asked.origin), resource_type)
    print(printable("\n".join(table_lines(document, sheet))))
    return 0

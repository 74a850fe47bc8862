"""``llmctl submit``."""

import shlex
from typing import Annotated, Any

import typer

from llmctl.cli.completion import complete_cluster, complete_run
from llmctl.cli.console import print_json, say
from llmctl.invocation import Invocation

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_Text = str | None
_Number = int | None


@app.command(epilog="llmctl submit [OPTIONS] -- COMMAND... runs COMMAND once on every node instead of the trainer.")
def submit(
    ctx: typer.Context,
    config: Annotated[
        _Text,
        typer.Argument(metavar="[CONFIG]", help="Training config. Default: ./llmctl.yaml, else a small example."),
    ] = None,
    cluster: Annotated[
        _Text, typer.Option(metavar="NAME", help="Where to run.", autocompletion=complete_cluster)
    ] = None,
    nodes: Annotated[_Number, typer.Option(metavar="N", help="Number of nodes.")] = None,
    gpus_per_node: Annotated[
        _Number, typer.Option("--gpus-per-node", metavar="G", help="Ranks per node. Default: the node's GPUs.")
    ] = None,
    time: Annotated[_Text, typer.Option(metavar="H:M:S", help="Time limit.")] = None,
    name: Annotated[_Text, typer.Option(metavar="N", help="Name of the run.")] = None,
    group: Annotated[_Text, typer.Option(metavar="G", help="Group, project or account to bill.")] = None,
    resource_type: Annotated[_Text, typer.Option("--resource-type", metavar="T", help="Kind of node.")] = None,
    queue: Annotated[_Text, typer.Option(metavar="Q", help="Queue or partition.")] = None,
    reservation: Annotated[_Text, typer.Option(metavar="ID", help="Nodes reserved earlier.")] = None,
    priority: Annotated[_Number, typer.Option(metavar="P", help="The scheduler's priority.")] = None,
    after: Annotated[
        _Text, typer.Option(metavar="RUN", help="Start when this run has ended.", autocompletion=complete_run)
    ] = None,
    container: Annotated[_Text, typer.Option(metavar="IMAGE", help="Container image.")] = None,
    mount: Annotated[
        list[str] | None,
        typer.Option("--mount", metavar="SRC:DST", help="Folder for the container. Repeatable."),
    ] = None,
    launcher: Annotated[_Text, typer.Option(metavar="torchrun|srun|mpirun", help="What starts the ranks.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the config; the value is YAML. Repeatable."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="Variable for the job. Repeatable."),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option("--secret", metavar="NAME", help="Variable whose value is never written down. Repeatable."),
    ] = None,
    run_id: Annotated[_Text, typer.Option("--run-id", metavar="ID", help="Run id. Default: a new one.")] = None,
    installed: Annotated[
        bool, typer.Option("--installed", help="Use the environment's trainer instead of a snapshot of ours.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the script and the submit command; do nothing.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Follow the run until it ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Start a training run, or any command, on a cluster."""
    from llmctl.submission import Request, perform, plan_submission

    invocation: Invocation = ctx.obj
    given = {
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        "time": time,
        "name": name,
        "group": group,
        "resource_type": resource_type,
        "queue": queue,
        "reservation": reservation,
        "priority": priority,
        "container": container,
        "mounts": mount,
        "launcher": launcher,
    }
    request = Request(
        config=config,
        cluster=invocation.cluster(cluster),
        flags=_flags(given),
        settings=tuple(settings or ()),
        env=tuple(env or ()),
        secrets=tuple(secret or ()),
        after=after,
        command=invocation.command,
        run_id=run_id,
        installed=installed,
    )
    plan = plan_submission(invocation, request)
    for remark in plan.remarks:
        say(remark)
    if dry_run:
        _show(plan, as_json)
        return 0
    record = perform(plan, invocation)
    if as_json:
        print_json(_summary(record, plan))
    elif not follow:
        print(record.run_id)
        say(f"started on {record.cluster}: {record.run_dir}\nllmctl logs -f {record.run_id}")
    if follow:
        from llmctl.follow import follow_run

        return follow_run(record, invocation.transport)
    return 0


def _flags(given: dict[str, Any]) -> tuple[Any, ...]:
    from llmctl.resolve import Flag

    return tuple(
        Flag("--mount" if key == "mounts" else f"--{key.replace('_', '-')}", f"job.{key}", value, adds=key == "mounts")
        for key, value in given.items()
        if value is not None
    )


def _show(plan: Any, as_json: bool) -> None:
    if not as_json:
        print(plan.rendered, end="")
        return
    commands = [{"host": command.host, "argv": command.argv} for command in plan.rendered.commands]
    print_json({**_summary(plan.record, plan), "script": plan.rendered.script, "commands": commands})


def _summary(record: Any, plan: Any) -> dict[str, Any]:
    jobs = [job for submission in record.submissions for job in submission.jobs]
    return {
        "run_id": record.run_id,
        "name": record.name,
        "cluster": record.cluster,
        "run_dir": str(record.run_dir),
        "job_ids": [job.job_id for job in jobs],
        "submitted": [shlex.join(command.argv) for command in plan.rendered.commands],
    }

"""``llmctl submit``: start a run on a cluster."""

from typing import Any

import typer

from llmctl.cli.completion import complete_cluster, complete_run
from llmctl.context import Context

app = typer.Typer(rich_markup_mode=None, add_completion=False)


def _option(flag: str, metavar: str, description: str, **more: Any) -> Any:
    return typer.Option(None, flag, metavar=metavar, help=description, **more)


def _switch(flag: str, description: str) -> Any:
    return typer.Option(False, flag, help=description)


_CONFIG = typer.Argument(None, metavar="CONFIG", help="Training config. Default: ./llmctl.yaml, else an example.")
_CLUSTER = _option("--cluster", "NAME", "Cluster. Default: local.", autocompletion=complete_cluster)
_NODES = _option("--nodes", "N", "Number of nodes.")
_GPUS_PER_NODE = _option("--gpus-per-node", "G", "Ranks per node. Default: the node's GPUs.")
_TIME = _option("--time", "H:M:S", "Time limit.")
_NAME = _option("--name", "N", "Name of the run.")
_GROUP = _option("--group", "G", "Group, project or account to bill.")
_RESOURCE_TYPE = _option("--resource-type", "T", "Kind of node.")
_QUEUE = _option("--queue", "Q", "Queue or partition.")
_RESERVATION = _option("--reservation", "ID", "Reservation of nodes.")
_PRIORITY = _option("--priority", "P", "Priority, in the scheduler's numbers.")
_AFTER = _option("--after", "RUN", "Start after this run completes; any:RUN: ends.", autocompletion=complete_run)
_CONTAINER = _option("--container", "IMAGE", "Container image.")
_MOUNTS = _option("--mount", "SRC:DST", "Folder to mount in the container. Repeatable.")
_LAUNCHER = _option("--launcher", "torchrun|srun|mpirun", "Launcher of the ranks.")
_SETTINGS = _option("--set", "KEY=VALUE", "Set a key of the config; the value is YAML. Repeatable.")
_ENV = _option("--env", "NAME=VALUE", "Variable for the job. Repeatable.")
_SECRETS = _option("--secret", "NAME", "Variable whose value stays out of script and record. Repeatable.")
_RUN_ID = _option("--run-id", "ID", "Run id. Default: a new one.")
_INSTALLED = _switch("--installed", "Use the trainer installed in the environment, not a snapshot of llmctl's.")
_TEMPLATE = _option("--template", "FILE", "Template of job.sh. Default: the scheduler's template.")
_DRY_RUN = _switch("--dry-run", "Print script and submit command; submit nothing.")
_FOLLOW = _switch("--follow", "Follow the run until it ends.")
_JSON = _switch("--json", "Print one JSON document.")

_JOB_FLAGS = {
    "nodes": "--nodes",
    "gpus_per_node": "--gpus-per-node",
    "time": "--time",
    "name": "--name",
    "group": "--group",
    "resource_type": "--resource-type",
    "queue": "--queue",
    "reservation": "--reservation",
    "priority": "--priority",
    "container": "--container",
    "mounts": "--mount",
    "launcher": "--launcher",
}
"""Key of the config's job section, also the name of the parameter -> flag."""


@app.command(epilog="llmctl submit [OPTIONS] -- COMMAND... runs COMMAND once on every node instead of the trainer.")
def submit(
    ctx: typer.Context,
    config: str | None = _CONFIG,
    cluster: str | None = _CLUSTER,
    nodes: int | None = _NODES,
    gpus_per_node: int | None = _GPUS_PER_NODE,
    time: str | None = _TIME,
    name: str | None = _NAME,
    group: str | None = _GROUP,
    resource_type: str | None = _RESOURCE_TYPE,
    queue: str | None = _QUEUE,
    reservation: str | None = _RESERVATION,
    priority: int | None = _PRIORITY,
    after: str | None = _AFTER,
    container: str | None = _CONTAINER,
    mounts: list[str] | None = _MOUNTS,
    launcher: str | None = _LAUNCHER,
    settings: list[str] | None = _SETTINGS,
    env: list[str] | None = _ENV,
    secrets: list[str] | None = _SECRETS,
    run_id: str | None = _RUN_ID,
    installed: bool = _INSTALLED,
    template: str | None = _TEMPLATE,
    dry_run: bool = _DRY_RUN,
    follow: bool = _FOLLOW,
    as_json: bool = _JSON,
) -> int:
    """Start a training run, or any command, on a cluster."""
    given = {key: value for key, value in locals().items() if key in _JOB_FLAGS and value is not None}
    from llmctl.cli.plan_output import carry_out, follow_started, show_plan
    from llmctl.submit.plan import Request, plan_submission
    from llmctl.submit.resolve import Flag

    context: Context = ctx.obj
    request = Request(
        config=config,
        flags=tuple(Flag(_JOB_FLAGS[key], f"job.{key}", given[key], adds=key == "mounts") for key in given),
        cluster=context.cluster(cluster),
        settings=tuple(settings or ()),
        env=tuple(env or ()),
        secrets=tuple(secrets or ()),
        after=after,
        command=context.command,
        run_id=run_id,
        installed=installed,
        dry_run=dry_run,
        template=template,
    )
    plan = plan_submission(context, request)
    if dry_run:
        show_plan(plan, context, as_json=as_json, more={})
        return 0
    record = carry_out(plan, context, as_json=as_json, follow=follow, more={})
    return follow_started(record, context, as_json=as_json) if follow else 0

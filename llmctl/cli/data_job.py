"""Flags of a data command's job, and its start."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmctl.cli.completion import complete_cluster
from llmctl.context import Context

if TYPE_CHECKING:
    from llmctl.operate.data_jobs import DataWork

JOB_FLAGS = {
    "nodes": "--nodes",
    "time": "--time",
    "name": "--name",
    "group": "--group",
    "resource_type": "--resource-type",
    "queue": "--queue",
    "container": "--container",
    "mounts": "--mount",
}
"""Job key, also the name of a command's parameter -> flag."""


def value(metavar: str, description: str, **more: Any) -> Any:
    """Build an option with a value."""
    return typer.Option(metavar=metavar, help=description, **more)


def switch(flag: str, description: str) -> Any:
    """Build an option without a value."""
    return typer.Option(flag, help=description)


Cluster = Annotated[str | None, value("NAME", "Cluster. Default: as for submit.", autocompletion=complete_cluster)]
Time = Annotated[str | None, value("H:M:S", "Time limit.")]
Group = Annotated[str | None, value("G", "Group, project or account to bill.")]
ResourceType = Annotated[str | None, value("T", "Kind of node. Default: the first kind without GPUs, if there is one.")]
Queue = Annotated[str | None, value("Q", "Queue or partition.")]
Container = Annotated[str | None, value("IMAGE", "Container image.")]
Mounts = Annotated[
    list[str] | None, typer.Option("--mount", metavar="SRC:DST", help="Folder to mount in the container. Repeatable.")
]
DryRun = Annotated[bool, switch("--dry-run", "Print script and submit command; submit nothing.")]
Follow = Annotated[bool, switch("--follow", "Follow the run until it ends.")]
AsJson = Annotated[bool, switch("--json", "Print one JSON document of the job.")]


def start(context: Context, work: "DataWork", given: Mapping[str, Any]) -> int:
    """Do ``work`` here, or submit its job with the given parameters; returns the exit code."""
    from llmctl.cli.plan_output import carry_out, follow_started, show_plan
    from llmctl.operate.data_jobs import plan_data_work
    from llmctl.submit.resolve import Flag

    flags = [
        Flag(flag, f"job.{key}", given[key], adds=key == "mounts") for key, flag in JOB_FLAGS.items() if given.get(key)
    ]
    as_json, follow = given["as_json"], given["follow"]
    plan = plan_data_work(context, context.cluster(given["cluster"]), work, flags, dry_run=given["dry_run"])
    if isinstance(plan, int):
        return plan
    if given["dry_run"]:
        show_plan(plan, context, as_json=as_json, more={})
        return 0
    record = carry_out(plan, context, as_json=as_json, follow=follow, more={})
    return follow_started(record, context, as_json=as_json) if follow else 0

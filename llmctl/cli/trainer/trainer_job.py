"""Flags of the job of a trainer's command, and its start."""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from llmctl.cli.completion import complete_cluster
from llmctl.context import Context

if TYPE_CHECKING:
    from llmctl.operate.trainer_jobs import TrainerWork
    from trainer.config.command_parser import CommandParser

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
_PANEL = "On a cluster"


def value(metavar: str, description: str, flag: str | None = None, **more: Any) -> Any:
    """Build an option with a value; without ``flag`` it is called as the parameter."""
    return typer.Option(
        *([] if flag is None else [flag]), metavar=metavar, help=description, rich_help_panel=_PANEL, **more
    )


def switch(flag: str, description: str) -> Any:
    """Build an option without a value."""
    return typer.Option(flag, help=description, rich_help_panel=_PANEL)


Cluster = Annotated[str | None, value("NAME", "Cluster. Default: as for submit.", autocompletion=complete_cluster)]
Time = Annotated[str | None, value("H:M:S", "Time limit.")]
Group = Annotated[str | None, value("GROUP", "Group, project or account to bill.")]
ResourceType = Annotated[
    str | None, value("TYPE", "Kind of node. Default: the first kind without GPUs, if there is one.")
]
Queue = Annotated[str | None, value("QUEUE", "Queue or partition.")]
Container = Annotated[str | None, value("IMAGE", "Container image.")]
Mounts = Annotated[list[str] | None, value("SRC:DST", "Folder to mount in the container. Repeatable.", flag="--mount")]
DryRun = Annotated[bool, switch("--dry-run", "Show the plan of the job; submit nothing.")]
ShowScript = Annotated[bool, switch("--show-script", "Print script and submit command; submit nothing.")]
Follow = Annotated[bool, switch("--follow", "Follow the run until it ends.")]
AsJson = Annotated[bool, switch("--json", "Print one JSON document of the job.")]


def start(context: Context, work: "TrainerWork", given: Mapping[str, Any]) -> int:
    """Do ``work`` here, or submit its job with the given parameters; returns the exit code."""
    from llmctl.cli.submit import Display, submit_plan
    from llmctl.operate.trainer_jobs import plan_trainer_work
    from llmctl.submit.job import Flag

    flags = [
        Flag(flag, f"job.{key}", given[key], adds=key == "mounts") for key, flag in JOB_FLAGS.items() if given.get(key)
    ]
    display = Display(
        dry_run=given["dry_run"], script=given["show_script"], as_json=given["as_json"], follow=given["follow"]
    )
    plan = plan_trainer_work(context, given["cluster"], work, flags, dry_run=display.dry_run or display.script)
    if isinstance(plan, int):
        return plan
    return submit_plan(plan, context, display)


class TrainerCommand(typer.core.TyperCommand):
    """Parses the flags of its job and passes all other flags to the trainer."""

    @abstractmethod
    def trainer_parser(self) -> "CommandParser":
        """Parser of the trainer's flags, whose help comes before that of the job's flags."""


def start_with_model(
    context: Context,
    command: str,
    words: Sequence[str],
    source: str,
    files: Sequence[str],
    valued: Collection[str],
    given: dict[str, Any],
) -> int:
    """Start a trainer's command on a trained model: a run becomes the folder of its checkpoints.

    Args:
        context: of this call.
        command: of the trainer.
        words: its arguments.
        source: the one of them that names the model.
        files: further files that it reads.
        valued: its flags that take a value.
        given: values of the job's flags, by the names of the parameters.
    """
    from llmctl.operate.trained_model import find_trained_model, with_source
    from llmctl.operate.trainer_jobs import TrainerWork

    found = find_trained_model(context, source, given["cluster"])
    # --json is the trainer's: it is about the result.
    given = {**given, "as_json": False}
    if found is not None:
        given["cluster"] = found.cluster
        words = with_source(list(words), source, found.folder, valued)
    model = source if found is None else str(found.folder)
    modules = None if found is None else found.modules
    return start(context, TrainerWork((command,), tuple(words), (model, *files), modules=modules), given)

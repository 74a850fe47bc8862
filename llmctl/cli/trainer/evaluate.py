"""``llmctl evaluate``: perplexity or tasks of a trained model, on this machine or as a job.

The trainer does the work. Its flags are declared in trainer.config.evaluate_flags and passed on unchanged, except that
a run becomes the folder of its checkpoints.
"""

from typing import TYPE_CHECKING, Annotated

import typer

from llmctl.cli.trainer.trainer_job import (
    Cluster,
    Container,
    DryRun,
    Follow,
    Group,
    Mounts,
    Queue,
    ShowScript,
    Time,
    TrainerCommand,
    start_with_model,
    value,
)

if TYPE_CHECKING:
    from trainer.config.command_parser import CommandParser

app = typer.Typer(rich_markup_mode=None, add_completion=False)


class EvaluateCommand(TrainerCommand):
    """Its help begins with the trainer's flags."""

    def trainer_parser(self) -> "CommandParser":
        """See TrainerCommand."""
        from trainer.config.evaluate_flags import parser_of

        return parser_of()


@app.command(cls=EvaluateCommand, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def evaluate(
    ctx: typer.Context,
    cluster: Cluster = None,
    time: Time = None,
    name: Annotated[str | None, value("NAME", "Name of the run. Default: evaluate.")] = None,
    group: Group = None,
    resource_type: Annotated[str | None, value("TYPE", "Kind of node.")] = None,
    queue: Queue = None,
    container: Container = None,
    mounts: Mounts = None,
    dry_run: DryRun = False,
    show_script: ShowScript = False,
    follow: Follow = False,
) -> int:
    """Evaluate a run, a checkpoint or a Hugging Face folder: perplexity, or tasks. On a cluster, submits a job."""
    given = locals()
    from trainer.config.evaluate_flags import VALUED, parse

    options = parse(ctx.args)
    files = [str(path) for path in (options.data_path, options.tokenizer) if path is not None]
    files += [task for task in (options.tasks or "").split(",") if task.endswith((".yaml", ".yml"))]
    return start_with_model(ctx.obj, "evaluate", ctx.args, options.source, files, VALUED, given)

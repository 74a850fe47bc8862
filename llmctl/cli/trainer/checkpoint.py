"""``llmctl checkpoint``: Hugging Face folders in and out, on the jobs' cluster.

The trainer does the work. Its flags are declared in trainer.config.checkpoint_flags and passed on unchanged, except
that a run becomes the folder of its checkpoints.
"""

from typing import TYPE_CHECKING, Annotated

import typer

from llmctl.cli.completion import complete_cluster
from llmctl.cli.trainer.trainer_job import TrainerCommand
from llmctl.context import Context

if TYPE_CHECKING:
    from trainer.config.command_parser import CommandParser

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME",
        help="Cluster. Default: that of the run, or as for submit.",
        autocompletion=complete_cluster,
    ),
]
_PASSING_ON = {"ignore_unknown_options": True, "allow_extra_args": True}


class CheckpointCommand(TrainerCommand):
    """Its help begins with the trainer's flags."""

    def trainer_parser(self) -> "CommandParser":
        """See TrainerCommand."""
        from trainer.config.checkpoint_flags import parser_of

        return parser_of(str(self.name))


@app.callback()
def checkpoint() -> None:
    """Show, import, export and check models in Hugging Face's format."""


@app.command("import", cls=CheckpointCommand, context_settings=_PASSING_ON)
def import_(ctx: typer.Context, cluster: _Cluster = None) -> int:
    """Turn a Hugging Face folder into a checkpoint; exit code 1 if its logits differ."""
    return _run(ctx, "import", cluster)


@app.command(cls=CheckpointCommand, context_settings=_PASSING_ON)
def export(ctx: typer.Context, cluster: _Cluster = None) -> int:
    """Turn a checkpoint into a Hugging Face folder; exit code 1 if its logits differ."""
    return _run(ctx, "export", cluster)


@app.command(cls=CheckpointCommand, context_settings=_PASSING_ON)
def show(ctx: typer.Context, cluster: _Cluster = None) -> int:
    """Show family, sizes, tokenizer and model section of a checkpoint or a folder."""
    return _run(ctx, "show", cluster)


@app.command(cls=CheckpointCommand, context_settings=_PASSING_ON)
def verify(ctx: typer.Context, cluster: _Cluster = None) -> int:
    """Compare a run's checkpoints with their checksums, or logits with a Hugging Face folder."""
    return _run(ctx, "verify", cluster)


def _run(ctx: typer.Context, command: str, cluster: str | None) -> int:
    from llmctl.operate.trained_model import find_trained_model, with_source
    from llmctl.operate.trainer_command import run_trainer_command
    from trainer.config.checkpoint_flags import VALUED, parse

    source = parse(command, ctx.args).source
    context: Context = ctx.obj
    words, chosen = list(ctx.args), context.cluster(cluster)
    found = find_trained_model(context, source, cluster) if command != "import" else None
    if found is not None:
        chosen = (found.cluster, f"run {source}")
        words = with_source(words, source, found.folder, VALUED)
    return run_trainer_command(context, context.profile(*chosen), ["checkpoint", command, *words])

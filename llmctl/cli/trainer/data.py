"""``llmctl data``: training data in Megatron-LM's .bin/.idx, on the jobs' cluster.

The trainer does the work. Its flags are declared in trainer.config.data_flags and passed on unchanged.
"""

from typing import TYPE_CHECKING, Annotated

import typer

from llmctl.cli.completion import complete_cluster
from llmctl.cli.trainer.trainer_job import (
    AsJson,
    Cluster,
    Container,
    DryRun,
    Follow,
    Group,
    Mounts,
    Queue,
    ResourceType,
    ShowScript,
    Time,
    TrainerCommand,
    start,
    value,
)
from llmctl.context import Context

if TYPE_CHECKING:
    from trainer.config.command_parser import CommandParser

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_CLUSTER = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Cluster. Default: as for submit.", autocompletion=complete_cluster),
]
_PASSING_ON = {"ignore_unknown_options": True, "allow_extra_args": True}


class DataCommand(TrainerCommand):
    """Its help begins with the trainer's flags."""

    def trainer_parser(self) -> "CommandParser":
        """See TrainerCommand."""
        from trainer.config.data_flags import parser_of

        return parser_of(str(self.name))


@app.callback()
def data() -> None:
    """Turn text into training data on any cluster; inspect and merge datasets."""


@app.command(cls=DataCommand, context_settings=_PASSING_ON)
def prepare(
    ctx: typer.Context,
    cluster: Cluster = None,
    nodes: Annotated[int | None, value("N", "Nodes that share the work.", min=1)] = None,
    time: Time = None,
    name: Annotated[str | None, value("NAME", "Name of the run. Default: prepare.")] = None,
    group: Group = None,
    resource_type: ResourceType = None,
    queue: Queue = None,
    container: Container = None,
    mounts: Mounts = None,
    dry_run: DryRun = False,
    show_script: ShowScript = False,
    follow: Follow = False,
    as_json: AsJson = False,
) -> int:
    """Tokenize text into Megatron-LM's .bin/.idx: PREFIX_KEY_document, or _sentence, with a manifest."""
    given = locals()
    from llmctl.operate.trainer_jobs import TrainerWork
    from trainer.config.data_flags import parse

    options = parse("prepare", ctx.args)
    tokenizer = (options.tokenizer_model, options.vocab_file, options.merge_file)
    paths = (*options.input, options.output_prefix, *(str(path) for path in tokenizer if path is not None))
    return start(ctx.obj, TrainerWork(("data", "prepare"), tuple(ctx.args), paths, by_nodes=True, on_cpu=True), given)


@app.command(cls=DataCommand, context_settings=_PASSING_ON)
def inspect(ctx: typer.Context, cluster: _CLUSTER = None) -> int:
    """Show documents, tokens, lengths and samples, and report damage; exit code 3 if anything is damaged."""
    return _run(ctx, "inspect", cluster)


@app.command(cls=DataCommand, context_settings=_PASSING_ON)
def merge(ctx: typer.Context, cluster: _CLUSTER = None) -> int:
    """Merge indexed datasets with the same tokenizer into one, in the given order."""
    return _run(ctx, "merge", cluster)


def _run(ctx: typer.Context, command: str, cluster: str | None) -> int:
    from llmctl.operate.trainer_command import run_trainer_command
    from trainer.config.data_flags import parse

    parse(command, ctx.args)
    context: Context = ctx.obj
    return run_trainer_command(context, context.profile(*context.cluster(cluster)), ["data", command, *ctx.args])

"""``llmctl import-script``: turn a Megatron-LM training script into a config, and start it if asked."""

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import typer

from llmctl.cli.completion import complete_cluster
from llmctl.context import Context
from llmctl.errors import ConfigFileError, UsageError

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_SCRIPT = typer.Argument(
    ...,
    metavar="FILE",
    help="Shell script that starts pretrain_gpt.py, pretrain_bert.py or pretrain_t5.py, or a model_config.yaml.",
)
_OUTPUT = typer.Option(None, "--output", "-o", metavar="CONFIG", help="Config file to write. Default: standard output.")
_GIVEN = typer.Option(
    None,
    "--arg",
    metavar="NAME=VALUE",
    help="Variable that the script leaves open; 1=VALUE is $1, vocab-file=VALUE that flag. Repeatable.",
)
_RUN = typer.Option(False, "--run", help="Submit at once, as llmctl submit FILE does.")
_CLUSTER = typer.Option(None, "--cluster", metavar="NAME", help="With --run: cluster.", autocompletion=complete_cluster)
_NODES = typer.Option(None, "--nodes", metavar="N", help="With --run: number of nodes.")
_GPUS = typer.Option(None, "--gpus-per-node", metavar="N", help="With --run: ranks per node.")
_SETTINGS = typer.Option(None, "--set", metavar="KEY=VALUE", help="With --run: set a key of the config. Repeatable.")
_SECRETS = typer.Option(
    None, "--secret", metavar="NAME", help="With --run: variable whose value stays secret. Repeatable."
)
_DRY_RUN = typer.Option(False, "--dry-run", help="With --run: print script and submit command; submit nothing.")
_FOLLOW = typer.Option(False, "--follow", help="With --run: follow the run until it ends.")
_JSON = typer.Option(False, "--json", help="With --run: print one JSON document.")


@app.command(
    epilog="The script is read, never executed. llmctl submit FILE.sh imports and starts in one step. Words after -- "
    "are the script's arguments: llmctl import-script FILE.sh -- ARGS."
)
def import_script(
    ctx: typer.Context,
    script: str = _SCRIPT,
    output: Path | None = _OUTPUT,
    given: list[str] | None = _GIVEN,
    run: bool = _RUN,
    cluster: str | None = _CLUSTER,
    nodes: int | None = _NODES,
    gpus_per_node: int | None = _GPUS,
    settings: list[str] | None = _SETTINGS,
    secrets: list[str] | None = _SECRETS,
    dry_run: bool = _DRY_RUN,
    follow: bool = _FOLLOW,
    as_json: bool = _JSON,
) -> int:
    """Turn a Megatron-LM training script into a config."""
    from llmctl.scripts.import_script import import_script as read
    from llmctl.scripts.import_script import parse_given

    context: Context = ctx.obj
    given = [*(given or ()), *_numbered(context.command, given or ())]
    if not run and any((cluster, nodes, gpus_per_node, settings, secrets, dry_run, follow, as_json)):
        raise UsageError("the flags of a submission go with --run; without it the config is only written")
    path = context.cwd / script
    if not path.is_file():
        raise UsageError(f"FILE: there is no file {script}; name a training script")
    imported = read(path, script, parse_given(given), datetime.now(), context.environment)
    if output is not None:
        _write(context.cwd / output, imported.text, str(output))
    elif not run:
        sys.stdout.write(imported.text)
    if not run:
        return 0
    from llmctl.cli.submit import Display, submit_plan
    from llmctl.submit.job import Flag, SubmitArguments
    from llmctl.submit.plan import plan_submission

    flags = [
        Flag(flag, f"job.{key}", value)
        for flag, key, value in (("--nodes", "nodes", nodes), ("--gpus-per-node", "gpus_per_node", gpus_per_node))
        if value is not None
    ]
    arguments = SubmitArguments(
        config=script if output is None else str(output),
        cluster=cluster,
        flags=tuple(flags),
        settings=tuple(settings or ()),
        secrets=tuple(secrets or ()),
        dry_run=dry_run,
        script_arguments=tuple(given) if output is None else (),
    )
    display = Display(dry_run=dry_run, as_json=as_json, follow=follow)
    return submit_plan(plan_submission(context, arguments), context, display)


def _numbered(arguments: Sequence[str], given: Sequence[str]) -> list[str]:
    """The words after ``--`` as ``1=WORD`` and so on, the form of --arg."""
    both = next((one for one in given if arguments and one.partition("=")[0].isdigit()), None)
    if both is not None:
        name = both.partition("=")[0]
        raise UsageError(f"--arg {name}: -- gives the script's arguments already; leave one of them out")
    return [f"{place}={word}" for place, word in enumerate(arguments, start=1)]


def _write(path: Path, text: str, shown: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"--output {shown}: exists already; name another file, or remove this one") from None
    except OSError as error:
        raise ConfigFileError(f"--output {shown}: cannot be written: {error.strerror}") from None

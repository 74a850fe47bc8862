"""``llmctl init``: write a complete config for a model or a script."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from llmctl.cli.console import write_new_file
from llmctl.context import Context
from llmctl.errors import UsageError
from llmctl.paths import expand_home

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def init(
    ctx: typer.Context,
    source: Annotated[
        str,
        typer.Option("--from", metavar="HF_DIR|GGUF|CKPT|SCRIPT", help="Model to train further, or a Megatron script."),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Config file to write. Default: llmctl.yaml.")
    ] = "llmctl.yaml",
) -> int:
    """Write a complete config, with comments, for a model or a script."""
    context: Context = ctx.obj
    path = context.cwd / expand_home(source, context.folders)
    target = context.cwd / expand_home(output, context.folders)
    if not path.exists():
        raise UsageError(f"--from: there is no {source}; name a folder of a model, or a training script")
    if path.is_file() and not _is_gguf(path):
        text = _of_script(path, source, context.environment)
    else:
        from llmctl.operate.first_config import first_config

        text = first_config(str(path.resolve()), output)
    write_new_file(target, text, output)
    context.tell(f"wrote {output}\nllmctl submit {output} --dry-run")
    return 0


def _is_gguf(path: Path) -> bool:
    from trainer.planning.start_model import LocalFiles, is_gguf

    return is_gguf(str(path), LocalFiles())


def _of_script(path: Path, source: str, environment: Mapping[str, str]) -> str:
    from datetime import datetime

    from llmctl.scripts.import_script import import_script
    from llmctl.submit.config_file import is_script

    if not is_script(path):
        raise UsageError(f"--from: {source} is not a shell script; name one, or the folder or GGUF file of a model")
    return import_script(path, source, {}, datetime.now(), environment).text

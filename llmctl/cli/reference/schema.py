"""``llmctl schema``: JSON schemas of config, profile, and the documents of ``--json``."""

from pathlib import Path
from typing import Annotated

import typer

from llmctl.cli.console import write_new_file
from llmctl.context import Context
from llmctl.errors import UsageError

app = typer.Typer(rich_markup_mode=None, add_completion=False)


def _complete(incomplete: str) -> list[str]:
    from llmctl.cli.reference.schemas import SCHEMAS

    return [name for name in SCHEMAS if name.startswith(incomplete)]


@app.command()
def schema(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Schema to print. Default: list all.", autocompletion=_complete)
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="File to write the schema to.")
    ] = None,
) -> int:
    """Print the JSON schema of a config, of a profile, or of what a command prints with --json.

    Editors check and complete a config whose first line is: # yaml-language-server: $schema=FILE
    """
    from llmctl.cli.reference.schemas import SCHEMAS, schema_text

    if name is None:
        if output is not None:
            raise UsageError(f"--output {output}: names the file of one schema; name the schema: {', '.join(SCHEMAS)}")
        width = max(map(len, SCHEMAS))
        print("\n".join(f"{each:<{width}}  {words}" for each, (words, _) in SCHEMAS.items()))
        return 0
    if name not in SCHEMAS:
        raise UsageError(f"NAME: there is no schema {name!r}; the schemas are {', '.join(SCHEMAS)}")
    if output is None:
        print(schema_text(name), end="")
        return 0
    context: Context = ctx.obj
    write_new_file(context.cwd / Path(output).expanduser(), schema_text(name), output)
    context.tell(f"wrote {output}")
    return 0

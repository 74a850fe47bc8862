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


def _complete_section(ctx: typer.Context, incomplete: str) -> list[str]:
    from llmctl.cli.reference.schemas import SCHEMAS, sections_of

    name = ctx.params.get("name")
    sections = sections_of(SCHEMAS[name][1]()) if name in ("config", "profile") else []
    return [each for each in sections if each.startswith(incomplete)]


@app.command()
def schema(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Schema to print. Default: list all.", autocompletion=_complete)
    ] = None,
    section: Annotated[
        str | None,
        typer.Option(
            metavar="SECTION", help="Only this section of config or profile.", autocompletion=_complete_section
        ),
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
        for flag, value, role in (("--output", output, "names the file"), ("--section", section, "is a section")):
            if value is not None:
                raise UsageError(f"{flag} {value}: {role} of one schema; name the schema: {', '.join(SCHEMAS)}")
        width = max(map(len, SCHEMAS))
        print("\n".join(f"{each:<{width}}  {words}" for each, (words, _) in SCHEMAS.items()))
        return 0
    if name not in SCHEMAS:
        raise UsageError(f"NAME: there is no schema {name!r}; the schemas are {', '.join(SCHEMAS)}")
    text = schema_text(name, section)
    if output is None:
        print(text, end="")
        return 0
    context: Context = ctx.obj
    write_new_file(context.cwd / Path(output).expanduser(), text, output)
    context.tell(f"wrote {output}")
    return 0

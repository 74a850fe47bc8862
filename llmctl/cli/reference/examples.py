"""``llmctl examples``: the configs that come with llmctl."""

import re
from pathlib import Path
from typing import Annotated

import typer

from llmctl.cli.console import write_new_file
from llmctl.context import Context
from llmctl.errors import UsageError
from llmctl.paths import BUNDLED

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_SUFFIX = ".yaml"
_WIDTH = 100
"""Characters of a description in the list."""


def _names() -> dict[str, Path]:
    return {path.stem: path for path in sorted((BUNDLED / "examples").glob(f"*{_SUFFIX}"))}


def _complete(incomplete: str) -> list[str]:
    return [name for name in _names() if name.startswith(incomplete)]


@app.command()
def examples(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Example to copy. Default: list all.", autocompletion=_complete)
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Config file to write. Default: NAME.yaml.")
    ] = None,
) -> int:
    """List the configs that come with llmctl, or copy one to start from."""
    known = _names()
    if name is None:
        if output is not None:
            raise UsageError("--output: goes with NAME; leave it out, or name an example")
        width = max(map(len, known))
        for each, path in known.items():
            print(f"{each:{width}}  {_first_sentence(path)}")
        return 0
    if name.removesuffix(_SUFFIX) not in known:
        raise UsageError(f"NAME: no example is called {name!r}; there are {', '.join(known)}")
    context: Context = ctx.obj
    source = known[name.removesuffix(_SUFFIX)]
    shown = output or source.name
    target = context.cwd / Path(shown).expanduser()
    text = source.read_text(encoding="utf-8")
    write_new_file(target, text, shown)
    next_step = f"llmctl submit {shown} --dry-run"
    if "data_path:" in text:
        next_step = f"set data.data_path to your own data; llmctl plan {shown} --cluster NAME --nodes N needs none"
    context.tell(f"wrote {shown}\n{next_step}")
    return 0


def _first_sentence(path: Path) -> str:
    """The first sentence of the comment at the head of an example, without its sources."""
    words = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            break
        words.append(line[2:])
    text = re.sub(r" \((?:[^()]|\([^()]*\))*\)", "", " ".join(words))
    first = re.split(r"(?<=[^.]\w)[.:] ", f"{text} ", maxsplit=1)[0]
    return first if len(first) <= _WIDTH else f"{first[:_WIDTH].rpartition(' ')[0]} ..."

"""``llmctl runs``: what remains of runs on disk."""

import sys
from typing import Annotated

import typer

from llmctl.cli.completion import complete_run
from llmctl.context import Context, say
from llmctl.errors import UsageError

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.callback()
def _runs() -> None:
    """Free the disk space of runs that have ended."""


@app.command("rm")
def remove(
    ctx: typer.Context,
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Run id, its beginning, run name or job id.", autocompletion=complete_run),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> int:
    """Remove checkpoints and code of ended runs. Record, config, metrics and logs stay; a resume is not possible."""
    from llmctl.operate.free_space import find_removable, remove_files

    context: Context = ctx.obj
    found = [find_removable(context, reference) for reference in dict.fromkeys(runs)]
    for each in found:
        names = ", ".join(path.rpartition("/")[2] for path in each.paths) or "nothing"
        size = "" if not each.paths else f", {_size_text(each.kib)}"
        say(f"{each.entry.run_id}: {names} in {each.entry.run_dir}{size}")
        if each.elsewhere is not None:
            say(f"{each.entry.run_id}: checkpoints in {each.elsewhere} stay; remove them yourself")
    found = [each for each in found if each.paths]
    if not found:
        return 0
    if not yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UsageError("nothing was removed: there is no terminal for the question; add --yes")
        if not typer.confirm("remove?", err=True):
            raise UsageError("nothing was removed")
    left = [path for each in found for path in remove_files(each)]
    for path in left:
        say(f"{path} could not be removed; is it another user's?")
    return 1 if left else 0


def _size_text(kib: int | None) -> str:
    if kib is None:
        return "of unknown size"
    return f"{kib / (1 << 20):,.1f} GiB" if kib >= 1 << 20 else f"{kib / 1024:,.1f} MiB"

"""``llmctl report``: runs as one HTML page."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from llmctl.cli.completion import complete_run
from llmctl.context import Context
from llmctl.errors import ConfigFileError, UsageError
from llmctl.runs.index import IndexEntry

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_HEAD = 4096
"""First bytes of a file, which have the mark of a page."""


@app.command()
def report(
    ctx: typer.Context,
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Run id, its beginning, run name or job id.", autocompletion=complete_run),
    ],
    output: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="The page. Default: report-RUN.html, here.")
    ] = None,
) -> None:
    """Write one HTML page about runs: curves, attempts, lost time, plan beside measured, cost, config.

    The page needs no network and no other file. A page of an earlier report is replaced, any other file never.
    """
    context: Context = ctx.obj
    entries = list(dict.fromkeys(context.index.find(name) for name in runs))
    target = context.cwd / Path(output if output is not None else _default_name(entries)).expanduser()
    _check_target(target)
    from llmctl.operate.report.gather import gather_runs
    from llmctl.operate.report.page import page_of

    page = page_of(gather_runs(context, entries)).encode()
    _write(target, page)
    print(output if output is not None else target.name)


def _default_name(entries: list[IndexEntry]) -> str:
    more = len(entries) - 1
    return f"report-{entries[0].run_id}{f'-and-{more}-more' if more else ''}.html"


def _check_target(target: Path) -> None:
    """Refuse a file that is not a page of an earlier report, before anything is read of the runs."""
    from llmctl.operate.report.page import MARK

    try:
        with target.open("rb") as file:
            is_ours = MARK in file.read(_HEAD)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"--output {target}: cannot be written: {error.strerror}") from None
    if not is_ours:
        raise UsageError(f"--output {target}: exists, and is not a page of llmctl report; name another file")


def _write(target: Path, page: bytes) -> None:
    """Write a page aside and rename: a reader never sees half a page."""
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".report-", suffix=".html")
        with os.fdopen(descriptor, "wb") as file:
            file.write(page)
        mask = os.umask(0)
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)
        Path(temporary).replace(target)
    except OSError as error:
        if temporary is not None:
            with suppress(OSError):
                Path(temporary).unlink()
        raise ConfigFileError(f"--output {target}: cannot be written: {error.strerror}") from None

"""``llmctl logs``: the output of a run, rank by rank."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from llmctl.cli.completion import complete_run
from llmctl.context import ClusterSession, Context, say
from llmctl.errors import UsageError
from llmctl.operate.follow import follow_run
from llmctl.operate.run_logs import Found, find_logs, log_choice, log_ends, notes_before
from llmctl.runs.record import RunRecord
from llmctl.transport.file_reads import FileRead
from llmctl.transport.protocol import Transport

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def logs(
    ctx: typer.Context,
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="Run id, its beginning, run name or job id.", autocompletion=complete_run),
    ],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Show new lines until the run ends.")] = False,
    lines: Annotated[
        int | None, typer.Option("-n", "--lines", metavar="N", min=0, help="Number of last lines per file.")
    ] = None,
    rank: Annotated[str | None, typer.Option("--rank", metavar="R[,R..]|all|failed", help="Ranks. Default: 0.")] = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", metavar="N", min=1, help="Attempt. Default: the last.")
    ] = None,
    job: Annotated[bool, typer.Option("--job", help="Show job.sh and the agents instead of ranks.")] = False,
    download: Annotated[
        str | None, typer.Option("--download", metavar="DIR", help="Copy the whole files, unchanged, to DIR.")
    ] = None,
) -> int:
    """Show or follow the output of a run.

    With --rank failed: in order of failure, with host, coordinates and cause; of a COMMAND, its traceback.
    """
    choice = log_choice(rank, job=job)
    if follow and download is not None:
        raise UsageError("--download: copies the present files; leave out -f")
    context: Context = ctx.obj
    entry = context.index.find(run)
    session = ClusterSession.of(context, entry.cluster, f"run {entry.run_id}")
    found = find_logs(RunRecord.load(entry.run_dir, session.transport), session, choice, attempt, follow=follow)
    if download is not None:
        return _download(found, (context.cwd / download).resolve())
    for note in notes_before(found):
        say(note)
    ends = log_ends(found, lines, follow=follow)
    for line in ends.lines:
        print(line)
    if ends.note:
        say(ends.note)
    sys.stdout.flush()
    if not follow:
        return 0
    return follow_run(
        found.record,
        session.transport,
        backend=session.backend,
        choice=choice,
        attempt=found.attempt,
        offsets=ends.offsets,
    )


def _download(found: Found, folder: Path) -> int:
    """Copy every file to ``folder``, under a temporary name until complete."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        copied = [_copy(found.session.transport, path, folder / Path(path).name) for path in found.files.values()]
    except OSError as error:
        raise UsageError(f"--download: {folder} cannot be written: {error.strerror}") from None
    print(f"{sum(copied)} files in {folder}")
    return 0


def _copy(transport: Transport, source: str, target: Path) -> bool:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            while True:
                (part,) = transport.read_parts([FileRead(source, file.tell())])
                if part is None:
                    return False
                file.write(part.data)
                if not part.data or part.end >= part.size:
                    break
        Path(temporary).replace(target)
        return True
    finally:
        Path(temporary).unlink(missing_ok=True)

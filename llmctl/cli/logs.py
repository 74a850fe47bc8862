"""``llmctl logs``: the output of a run, rank by rank."""

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from llmctl.cli.completion import complete_run
from llmctl.context import ClusterSession, Context, say
from llmctl.errors import RecordError, UsageError
from llmctl.job_state import JobState
from llmctl.operate.follow import default_choice, follow_run, pending_words
from llmctl.runs.attempts import attempt_numbers
from llmctl.runs.facts import RankError, first_error, parse_error
from llmctl.runs.failure_words import SEARCHED_LINES, failure_words
from llmctl.runs.log_selection import LogChoice, spans
from llmctl.runs.logs import LogLine, clean, last_lines, rank_logs
from llmctl.runs.observe import observe_run
from llmctl.runs.record import RunRecord
from llmctl.transport.file_reads import FileRead
from llmctl.transport.protocol import Transport

LINES_OF_ONE = 100
LINES_OF_MANY = 20
"""Lines per file if several files are shown."""

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
    if job and rank is not None:
        raise UsageError("--job: shows no output of ranks; leave out --rank")
    if follow and download is not None:
        raise UsageError("--download: copies the present files; leave out -f")
    choice = LogChoice("job") if job else LogChoice.parse(rank) if rank is not None else None
    context: Context = ctx.obj
    entry = context.index.find(run)
    session = ClusterSession.of(context, entry.cluster, f"run {entry.run_id}")
    found = _find(RunRecord.load(entry.run_dir, session.transport), session, choice, attempt, follow)
    if download is not None:
        return _download(found, (context.cwd / download).resolve())
    _say_what_failed(found)
    if found.choice.kind == "failed" and not found.errors and not follow:
        _show_end_of_command(found, lines)
        return 0
    count = lines if lines is not None else LINES_OF_ONE if len(found.files) < 2 else LINES_OF_MANY
    ends = _show_last(found, count, whole_only=follow)
    sys.stdout.flush()
    if not follow:
        return 0
    return follow_run(
        found.record, session.transport, backend=session.backend, choice=choice, attempt=found.attempt, offsets=ends
    )


@dataclass(frozen=True)
class Found:
    """The chosen log files (source -> path), and the attempt's errors, cause first."""

    record: RunRecord
    session: ClusterSession
    choice: LogChoice
    attempt: int | None
    files: dict[str, str]
    errors: tuple[RankError, ...]


def _find(
    record: RunRecord, session: ClusterSession, choice: LogChoice | None, attempt: int | None, follow: bool
) -> Found:
    transport = session.transport
    attempts = attempt_numbers(record, transport)
    if attempt is not None and attempt not in attempts:
        there = f"there are attempts {spans(attempts)}" if attempts else "no attempt has started yet"
        raise RecordError(f"{record.run_id}: there is no attempt {attempt}; {there}")
    if follow and attempt is not None and attempt != attempts[-1]:
        raise UsageError(f"-f: attempt {attempt} has ended, the last one is {attempts[-1]}; leave out -f or --attempt")
    number = attempt if attempt is not None else max(attempts, default=None)
    if number is None:
        chosen = choice or LogChoice("job")
        return Found(record, session, chosen, None, LogChoice("job").files(str(record.run_dir), 0, [], []), ())
    folder = f"{record.run_dir}/attempts/{number}"
    names, error_names = transport.list_names([folder, f"{folder}/errors"])
    errors = _errors(transport, [f"{folder}/errors/{name}" for name in error_names if not name.startswith(".")])
    chosen = choice or default_choice(record, names)
    if _is_undivided(record, names, chosen) or (chosen.kind == "failed" and not errors and not follow):
        files = LogChoice("job").files(str(record.run_dir), number, names, [])
        return Found(record, session, chosen, number, files, errors)
    absence = chosen.absence(names)
    if absence and not follow:
        raise RecordError(f"{record.run_id}: {absence}")
    if absence:
        say(f"{record.run_id}: {absence}; waiting for it")
    files = chosen.files(str(record.run_dir), number, names, [error.rank for error in errors])
    return Found(record, session, chosen, number, files, errors)


def _is_undivided(record: RunRecord, names: Sequence[str], choice: LogChoice) -> bool:
    """True if all ranks of a COMMAND are chosen, whose output is in the logs of job.sh and the nodes.

    Raises:
        UsageError: single ranks of such a COMMAND are chosen.
    """
    if record.config is not None or rank_logs(names):
        return False
    if choice.kind == "ranks":
        raise UsageError(f"--rank: the output of a COMMAND is not divided by ranks; llmctl logs {record.run_id} has it")
    return choice.kind == "all"


def _errors(transport: Transport, paths: Sequence[str]) -> tuple[RankError, ...]:
    parts = transport.read_parts([FileRead(path) for path in paths])
    parsed = [parse_error(part.data) for part in parts if part is not None]
    errors = tuple(sorted((one for one in parsed if one is not None), key=lambda error: (error.time, error.rank)))
    cause = first_error(errors)
    return (cause, *(error for error in errors if error is not cause)) if cause is not None else ()


def _say_what_failed(found: Found) -> None:
    if found.choice.kind != "failed":
        return
    if not found.errors:
        where = f" in attempt {found.attempt}" if found.attempt is not None else ""
        say(f"{found.record.run_id}: no rank wrote an error report{where}; this is from the output of the job:")
    for number, error in enumerate(found.errors):
        say(f"{'first' if number == 0 else 'then'}: {error.summary()}")


def _show_end_of_command(found: Found, count: int | None) -> None:
    """Show the traceback and torchrun's report in the output; without both, its last lines."""
    read = found.session.transport.read_parts
    ends = last_lines(read, list(found.files.values()), SEARCHED_LINES, whole_only=False)
    outputs = {source: texts for source, (texts, _) in zip(found.files, ends, strict=True) if texts}
    words = {source: failure_words(texts) for source, texts in outputs.items()}
    shown = {source: texts for source, texts in words.items() if texts}
    if not shown:
        least = LINES_OF_MANY if count is None else count
        shown = {source: texts[max(0, len(texts) - least) :] for source, texts in outputs.items()}
    for source, texts in shown.items():
        for text in texts:
            print(str(LogLine(source, text)) if len(shown) > 1 else text)


def _show_last(found: Found, count: int, *, whole_only: bool) -> dict[str, int]:
    """Print the last lines of every file; returns the offset for following, by source."""
    ends = last_lines(found.session.transport.read_parts, list(found.files.values()), count, whole_only=whole_only)
    shown = {source: tail for source, tail in zip(found.files, ends, strict=True) if tail[0]}
    _show_traceback(found, {source: texts for source, (texts, _) in shown.items()})
    for source, (texts, _) in shown.items():
        for text in texts:
            print(str(LogLine(source, text)) if len(shown) > 1 else text)
    if not shown and found.choice.kind != "failed" and not whole_only:
        say(f"{found.record.run_id}: {_why_nothing(found)}")
    return {source: end for source, (_, end) in zip(found.files, ends, strict=True)}


def _show_traceback(found: Found, shown: Mapping[str, Sequence[str]]) -> None:
    """Show the first failing rank's traceback, unless the shown lines contain it, or the message says all."""
    cause = found.errors[0] if found.choice.kind == "failed" and found.errors else None
    lines = cause.traceback.rstrip().splitlines() if cause is not None and not cause.is_own else []
    if cause is None or not lines:
        return
    source = f"rank {cause.rank}"
    if lines[-1].strip() not in (text.strip() for text in shown.get(source, ())):
        for line in lines:
            print(LogLine(source, clean(line.encode())))


def _why_nothing(found: Found) -> str:
    """Explain why a run has printed nothing: most likely, it has not started."""
    transport = found.session.transport
    view = observe_run(found.record, transport, found.session.watch())
    if view.state.is_finished:
        return f"ended without output: {view.summary}"
    how = pending_words(view, transport.now()) if view.state is JobState.PENDING else view.summary
    return f"no output yet; {how}"


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

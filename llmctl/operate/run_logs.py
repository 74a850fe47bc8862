"""The output of a run: its log files by rank, their last lines, and what failed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llmctl.context import ClusterSession
from llmctl.errors import RecordError, UsageError
from llmctl.job_state import JobState
from llmctl.operate.follow import default_choice, pending_words
from llmctl.runs.attempts import attempt_numbers
from llmctl.runs.facts import RankError, first_error, parse_error
from llmctl.runs.failures.flight_records import guilty_by_flight_records
from llmctl.runs.failures.words import SEARCHED_LINES, failure_words
from llmctl.runs.log_selection import LogChoice, spans
from llmctl.runs.logs import LogLine, clean, last_lines, rank_logs
from llmctl.runs.observe import observe_run
from llmctl.runs.record import RunRecord
from llmctl.transport.file_reads import FileRead
from llmctl.transport.protocol import Transport

LINES_OF_ONE = 100
LINES_OF_MANY = 20
"""Lines per file if several files are shown."""


@dataclass(frozen=True)
class Found:
    """The chosen log files (source -> path), and the attempt's errors, cause first.

    Attributes:
        note: words on files that have yet to appear; else empty.
        guilty: sentences on a hang: the ranks that hold the others up, and where the stacks are.
    """

    record: RunRecord
    session: ClusterSession
    choice: LogChoice
    attempt: int | None
    files: dict[str, str]
    errors: tuple[RankError, ...]
    note: str = ""
    guilty: tuple[str, ...] = ()


def log_choice(rank: str | None, *, job: bool) -> LogChoice | None:
    """The choice of ``--rank`` and ``--job``; None without both.

    Raises:
        UsageError: both are given, or the ranks are not valid.
    """
    if job and rank is not None:
        raise UsageError("--job: shows no output of ranks; leave out --rank")
    return LogChoice("job") if job else LogChoice.parse(rank) if rank is not None else None


def find_logs(
    record: RunRecord, session: ClusterSession, choice: LogChoice | None, attempt: int | None, *, follow: bool
) -> Found:
    """Find the log files of a run.

    Args:
        record: the run's record.
        session: the run's cluster.
        choice: the logs; None: rank 0, else job.sh and the agents.
        attempt: number of the attempt; None: the last.
        follow: True if files may appear later.

    Raises:
        RecordError: there is no such attempt, or no such rank has a log.
        UsageError: the choice does not go with the run.
    """
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
    guilty = _guilty(folder, transport) if chosen.kind == "failed" else ()
    if _is_undivided(record, names, chosen) or (chosen.kind == "failed" and not errors and not follow):
        files = LogChoice("job").files(str(record.run_dir), number, names, [])
        return Found(record, session, chosen, number, files, errors, guilty=guilty)
    absence = chosen.absence(names)
    if absence and not follow:
        raise RecordError(f"{record.run_id}: {absence}")
    note = f"{record.run_id}: {absence}; waiting for it" if absence else ""
    files = chosen.files(str(record.run_dir), number, names, [error.rank for error in errors])
    return Found(record, session, chosen, number, files, errors, note, guilty)


def _guilty(folder: str, transport: Transport) -> tuple[str, ...]:
    """All that is known of a hang: ranks by torch's flight records, and where the stacks are."""
    found = guilty_by_flight_records(f"{folder}/flight", transport)
    (stacks,) = transport.list_names([f"{folder}/stacks"])
    if not stacks:
        return found
    return (*found, f"stacks of ranks at a hang ({len(stacks)}): {folder}/stacks")


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


def notes_before(found: Found) -> Iterator[str]:
    """Messages before the lines: the files that have yet to appear, and what failed."""
    if found.note:
        yield found.note
    if found.choice.kind != "failed":
        return
    yield from found.guilty
    if not found.errors:
        where = f" in attempt {found.attempt}" if found.attempt is not None else ""
        yield f"{found.record.run_id}: no rank wrote an error report{where}; this is from the output of the job:"
    for number, error in enumerate(found.errors):
        yield f"{'first' if number == 0 else 'then'}: {error.summary()}"


@dataclass(frozen=True)
class LogEnds:
    """The last lines of log files.

    Attributes:
        lines: of all files, each with its source if there are several.
        note: the reason why there are none; else empty.
        offsets: source -> offset for following.
    """

    lines: tuple[str, ...]
    note: str = ""
    offsets: Mapping[str, int] = field(default_factory=dict)


def log_ends(found: Found, count: int | None, *, follow: bool) -> LogEnds:
    """The last lines of every file.

    Args:
        found: the files.
        count: lines of each file; None: more of a single file than of each of many.
        follow: only whole lines, as more will come.
    """
    if found.choice.kind == "failed" and not found.errors and not follow:
        return LogEnds(tuple(_end_of_command(found, count)))
    if count is None:
        count = LINES_OF_ONE if len(found.files) < 2 else LINES_OF_MANY
    ends = last_lines(found.session.transport.read_parts, list(found.files.values()), count, whole_only=follow)
    shown = {source: texts for source, (texts, _) in zip(found.files, ends, strict=True) if texts}
    is_silent = not shown and found.choice.kind != "failed" and not follow
    return LogEnds(
        (*_traceback(found, shown), *_with_sources(shown)),
        f"{found.record.run_id}: {_why_nothing(found)}" if is_silent else "",
        {source: end for source, (_, end) in zip(found.files, ends, strict=True)},
    )


def _end_of_command(found: Found, count: int | None) -> Iterator[str]:
    """The traceback and torchrun's report in the output; without both, its last lines."""
    read = found.session.transport.read_parts
    ends = last_lines(read, list(found.files.values()), SEARCHED_LINES, whole_only=False)
    outputs = {source: texts for source, (texts, _) in zip(found.files, ends, strict=True) if texts}
    words = {source: failure_words(texts) for source, texts in outputs.items()}
    shown = {source: texts for source, texts in words.items() if texts}
    if not shown:
        least = LINES_OF_MANY if count is None else count
        shown = {source: texts[max(0, len(texts) - least) :] for source, texts in outputs.items()}
    yield from _with_sources(shown)


def _with_sources(shown: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The lines, each with its source if there are several."""
    for source, texts in shown.items():
        yield from (str(LogLine(source, text)) if len(shown) > 1 else text for text in texts)


def _traceback(found: Found, shown: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The first failing rank's traceback, unless the shown lines contain it, or the message says all."""
    cause = found.errors[0] if found.choice.kind == "failed" and found.errors else None
    lines = cause.traceback.rstrip().splitlines() if cause is not None and not cause.is_own else []
    if cause is None or not lines:
        return
    source = f"rank {cause.rank}"
    if lines[-1].strip() not in (text.strip() for text in shown.get(source, ())):
        yield from (str(LogLine(source, clean(line.encode()))) for line in lines)


def _why_nothing(found: Found) -> str:
    """Explain why a run has printed nothing: most likely, it has not started."""
    transport = found.session.transport
    view = observe_run(found.record, transport, found.session.watch())
    if view.state.is_finished:
        return f"ended without output: {view.summary}"
    how = pending_words(view, transport.now()) if view.state is JobState.PENDING else view.summary
    return f"no output yet; {how}"

"""RunRecord: the history of one run (``run.json``). RunIndex: the locations of this user's runs.

The run directory is the source of truth. The index only caches locations and last seen states, and can be rebuilt by
listing runs_root. Both are written to a temporary file and renamed, mode 0600, so that readers never see half a file.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.backends.base import SubmittedJob
from llmctl.errors import RecordError
from llmctl.transport.file_reads import FileRead
from llmctl.transport.file_writes import FileWrite, write_files

if TYPE_CHECKING:
    from llmctl.transport.protocol import Transport

SCHEMA = 1
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Valid run ids and run names: both become a folder name and a scheduler's job name."""

_LIMIT = 1 << 24
"""Most bytes read of a run.json: far above a config and a hundred submissions."""
_NUMBER, _MAYBE = (int, float), type(None)
_RECORD_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("run_id", "name", "llmctl_version", "cluster"), (str,)),
    **dict.fromkeys(("job", "origins", "code"), (dict,)),
    **dict.fromkeys(("command", "submissions"), (list,)),
    "created": _NUMBER,
    **dict.fromkeys(("config", "template"), (dict, _MAYBE)),
    "cwd": (str, _MAYBE),
}
_SUBMISSION_TYPES: Mapping[str, tuple[type, ...]] = {
    "number": (int,),
    "time": _NUMBER,
    **dict.fromkeys(("jobs", "hosts"), (list,)),
    "cancel_requested": (*_NUMBER, _MAYBE),
}
_JOB_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("host", "job_id"), (str,)),
    **dict.fromkeys(("pid", "pid_start_time"), (int, _MAYBE)),
    "boot_id": (str, _MAYBE),
}
_ENTRY_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("run_id", "name", "cluster", "run_dir"), (str,)),
    "created": _NUMBER,
    "job_ids": (list,),
}


@dataclass(frozen=True)
class Submission:
    """One handing-over of a run to its cluster.

    Attributes:
        number: 1 for the first, increasing with every resume.
        time: seconds since 1970.
        jobs: the submitted jobs; empty between recording and acceptance.
        cancel_requested: time of the first ``llmctl cancel``; None before.
        hosts: machines that llmctl chose, the head first; empty if a scheduler chooses, or in old records.
    """

    number: int
    time: float
    jobs: tuple[SubmittedJob, ...] = ()
    cancel_requested: float | None = None
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunRecord:
    """The contents of run.json. A value: changes make a new record, ``save`` writes the record.

    Attributes:
        run_id: name of the run directory, never reused.
        name: the user's name for the run.
        created: seconds since 1970.
        llmctl_version: version of llmctl at the first submission.
        cluster: name of the profile.
        run_dir: absolute path, on the file system that the nodes share.
        command: argv of llmctl as typed, with the values of --env; never holds the values of secrets.
        job: the JobSpec as plain values, secrets by name.
        config: the resolved TrainConfig as plain values; None for a COMMAND.
        origins: dotted key -> origin of its value: a flag, a file, ``profile``.
        code: ``trainer`` sha256 of the snapshot (None: installed), ``commit`` and ``diff`` of the user's project.
        submissions: oldest first.
        cwd: working directory of ``command``, and of a COMMAND; None in records without this field.
        template: ``path`` and ``text`` of the user's template of job.sh; None: the scheduler's template.
    """

    run_id: str
    name: str
    created: float
    llmctl_version: str
    cluster: str
    run_dir: Path
    command: tuple[str, ...]
    job: Mapping[str, Any]
    config: Mapping[str, Any] | None
    origins: Mapping[str, str]
    code: Mapping[str, str | None]
    submissions: tuple[Submission, ...] = ()
    cwd: str | None = None
    template: Mapping[str, str] | None = None

    @classmethod
    def load(cls, run_dir: Path, transport: "Transport") -> "RunRecord":
        """Load the record of a run directory.

        Args:
            run_dir: on the machine of ``transport``.
            transport: the machine.

        Raises:
            RecordAbsent: there is no record.
            RecordError: the record cannot be read.
            SchedulerError: the machine cannot be reached.
        """
        (found,) = load_records([run_dir], transport)
        if isinstance(found, RecordError):
            raise found
        return found

    @classmethod
    def of_json(cls, run_dir: Path, text: bytes) -> "RunRecord":
        """Parse ``text``, the run.json of ``run_dir``.

        Raises:
            RecordError: the text is damaged, or is no record.
        """
        path = run_dir / "run.json"
        values = _parse_json(path, text)
        try:
            if values["schema"] != SCHEMA:
                raise RecordError(f"{path}: schema {values['schema']} is unknown to this llmctl; use a newer llmctl")
            values = {"cwd": None, "template": None, **values}
            fields = {name: values[name] for name in cls.__dataclass_fields__}
            _check_types(values, _RECORD_TYPES)
            if not RUN_ID.fullmatch(values["run_id"]):
                raise TypeError(f"run_id cannot be {values['run_id']!r}")
            _check_types(values["config"] or {}, dict.fromkeys(values["config"] or {}, (dict,)))
            submissions = tuple(map(_submission_of, values["submissions"]))
        except KeyError as error:
            raise RecordError(f"{path}: is not a run record: {error} is missing") from None
        except TypeError as error:
            raise RecordError(f"{path}: is not a run record: {error}") from None
        # The directory may have been moved: the place where it was found is its present path.
        return cls(**{**fields, "run_dir": run_dir, "command": tuple(values["command"]), "submissions": submissions})

    def save(self, transport: "Transport") -> None:
        """Write run.json atomically, on the machine of ``transport``.

        Raises:
            RecordError: run.json cannot be written.
            SchedulerError: the machine cannot be reached.
        """
        path = self.run_dir / "run.json"
        try:
            transport.write_files([FileWrite(str(path), self.as_json())])
        except OSError as error:
            raise RecordError(f"{path}: cannot be written: {error.strerror}") from None

    def as_json(self) -> bytes:
        """The bytes of run.json."""
        return _json_bytes({"schema": SCHEMA, **asdict(self), "run_dir": str(self.run_dir)})

    def with_submission(self, submission: Submission) -> "RunRecord":
        """The record with ``submission`` added, or replacing the submission with the same number."""
        kept = tuple(entry for entry in self.submissions if entry.number != submission.number)
        return replace(self, submissions=(*kept, submission))

    def with_cancel_requested(self, time: float) -> "RunRecord":
        """The record with a cancel request on the newest submission; the first request time stays."""
        if not self.submissions or self.submissions[-1].cancel_requested is not None:
            return self
        return self.with_submission(replace(self.submissions[-1], cancel_requested=time))


class RecordAbsent(RecordError):
    """A run directory that is missing or has no record."""


def load_records(run_dirs: Sequence[Path], transport: "Transport") -> list[RunRecord | RecordError]:
    """The records of run directories of one machine, in order; an error for each unreadable record.

    One round trip for any number of runs, and a second if some records are unreadable.

    Raises:
        SchedulerError: the machine cannot be reached.
    """
    paths = [str(run_dir / "run.json") for run_dir in run_dirs]
    parts = transport.read_parts([FileRead(path, limit=_LIMIT) for path in paths])
    lost = [path for path, part in zip(paths, parts, strict=True) if part is None]
    facts = dict(zip(lost, transport.stat_paths(lost), strict=True)) if lost else {}
    found: list[RunRecord | RecordError] = []
    for run_dir, path, part in zip(run_dirs, paths, parts, strict=True):
        try:
            if part is None:
                is_there = facts[path].kind or not facts[path].nearest_kind
                raise (RecordError if is_there else RecordAbsent)(
                    f"{path}: {'cannot be read' if is_there else 'is not there'}"
                )
            found.append(RunRecord.of_json(run_dir, part.data))
        except RecordError as error:
            found.append(error)
    return found


@dataclass(frozen=True)
class IndexEntry:
    """Location of one run, and the state last seen."""

    run_id: str
    name: str
    cluster: str
    run_dir: Path
    created: float
    job_ids: tuple[str, ...] = ()
    last_state: str | None = None
    last_seen: float | None = None


@dataclass(frozen=True)
class RunIndex:
    """One small JSON file per run under ``state_dir``/runs. Concurrent submits never share a file."""

    state_dir: Path

    @property
    def folder(self) -> Path:
        """The folder of the index files."""
        return self.state_dir / "runs"

    def add(self, record: RunRecord) -> None:
        """Add a run, or update its job ids; the state last seen is kept."""
        known = self._entry(self._path(record.run_id))
        entry = _entry_of(record)
        self._write(
            replace(entry, last_state=known.last_state, last_seen=known.last_seen)
            if known is not None and known.job_ids == entry.job_ids
            else entry
        )

    def remove(self, run_id: str) -> None:
        """Forget a run that its cluster never accepted."""
        self._path(run_id).unlink(missing_ok=True)

    def entries(self) -> list[IndexEntry]:
        """All runs, oldest first. Unreadable files are skipped: ``rebuild`` restores them."""
        found = (self._entry(path) for path in self.folder.glob("*.json"))
        return sorted((entry for entry in found if entry is not None), key=lambda entry: (entry.created, entry.run_id))

    def find(self, reference: str) -> IndexEntry:
        """Find a run by run id or its unique prefix, newest name, or job id.

        Raises:
            RecordError: no run matches, or several do; lists the candidates.
        """
        # A whole run id comes first, and needs no look at the other runs, of which there may be thousands.
        whole = self._entry(self._path(reference)) if RUN_ID.fullmatch(reference) else None
        if whole is not None and whole.run_id == reference:
            return whole
        entries = self.entries()
        rules: tuple[Callable[[IndexEntry], bool], ...] = (
            lambda entry: entry.name == reference,
            lambda entry: reference in entry.job_ids,
            lambda entry: bool(reference) and entry.run_id.startswith(reference),
        )
        for number, rule in enumerate(rules):
            found = [entry for entry in entries if rule(entry)]
            if len(found) == 1 or (found and number in (0, 1)):
                return found[-1]  # the newest run of a name or job id; schedulers reuse job ids
            if found:
                raise RecordError(f"{reference!r} is the beginning of several runs: {_names(found)}; give more of it")
        known = f"; the newest are {_names(entries)}" if entries else "; there is no run yet: llmctl submit starts one"
        raise RecordError(f"no run is called {reference!r}{known}")

    def beginning_with(self, beginning: str, limit: int) -> list[IndexEntry]:
        """The runs whose ids begin so, newest first; reads the files of at most ``limit`` runs, by their file times."""
        with suppress(FileNotFoundError), os.scandir(self.folder) as found:
            files = [file for file in found if file.name.startswith(beginning) and file.name.endswith(".json")]
            if len(files) > limit:
                files = sorted(files, key=lambda file: file.stat().st_mtime)[-limit:]
            entries = [entry for file in files if (entry := self._entry(Path(file.path))) is not None]
            return sorted(entries, key=lambda entry: (entry.created, entry.run_id), reverse=True)
        return []

    def update_state(self, run_id: str, state: str, seen: float) -> None:
        """Store the state in which a run was last seen.

        Args:
            run_id: the run; ignored if the index does not hold it.
            state: the neutral word.
            seen: seconds since 1970.
        """
        entry = self._entry(self._path(run_id))
        if entry is not None:
            self._write(replace(entry, last_state=str(state), last_seen=seen))

    def rebuild(self, runs_root: Path, transport: "Transport") -> tuple[list[IndexEntry], int]:
        """Add every run in ``runs_root`` of a machine.

        Entries of other runs are kept. Directories without a readable record are skipped.

        Returns:
            The entries of the runs, oldest first, and the number of records that cannot be read: mostly of other users.

        Raises:
            SchedulerError: the machine cannot be reached.
        """
        (names,) = transport.list_names([str(runs_root)])
        found, unread = set(), 0
        for record in load_records([runs_root / name for name in names if RUN_ID.fullmatch(name)], transport):
            if isinstance(record, RunRecord):
                self.add(record)
                found.add(record.run_id)
            else:
                unread += not isinstance(record, RecordAbsent)
        return [entry for entry in self.entries() if entry.run_id in found], unread

    def _path(self, run_id: str) -> Path:
        return self.folder / f"{run_id}.json"

    def _entry(self, path: Path) -> IndexEntry | None:
        try:
            values = _parse_json(path, path.read_bytes())
            _check_types(values, _ENTRY_TYPES)
            return IndexEntry(**{**values, "run_dir": Path(values["run_dir"]), "job_ids": tuple(values["job_ids"])})
        except (OSError, RecordError, KeyError, TypeError):
            return None

    def _write(self, entry: IndexEntry) -> None:
        _write_json(self._path(entry.run_id), {**asdict(entry), "run_dir": str(entry.run_dir)})


def new_run_id(name: str, local_time: str) -> str:
    """``<name>-<yymmdd>-<hhmmss>-<4 hex>``. Creating the run directory, not chance, guarantees uniqueness.

    Args:
        name: the run's name.
        local_time: ``yymmdd-hhmmss``.
    """
    return f"{name}-{local_time}-{os.urandom(2).hex()}"


def _submission_of(values: Mapping[str, Any]) -> Submission:
    _check_types({"hosts": [], **values}, _SUBMISSION_TYPES)
    for job in values["jobs"]:
        _check_types(job, _JOB_TYPES)
    jobs = tuple(SubmittedJob(**job) for job in values["jobs"])
    return Submission(**{**values, "jobs": jobs, "hosts": tuple(map(str, values.get("hosts", ())))})


def _check_types(values: Any, types: Mapping[str, tuple[type, ...]]) -> None:
    """Raise TypeError for a value of an unexpected type, KeyError for a missing value."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{values!r} is no object")
    for key, allowed in types.items():
        if not isinstance(values[key], allowed):
            raise TypeError(f"{key} cannot be {values[key]!r}")


def _entry_of(record: RunRecord) -> IndexEntry:
    ids = tuple(job.job_id for submission in record.submissions for job in submission.jobs)
    return IndexEntry(record.run_id, record.name, record.cluster, record.run_dir, record.created, ids)


def _names(entries: Iterable[IndexEntry]) -> str:
    names = [entry.run_id for entry in entries][::-1]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _parse_json(path: Path, text: bytes) -> dict[str, Any]:
    import json

    try:
        values = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}: is damaged: {error}") from None
    if not isinstance(values, dict):
        raise RecordError(f"{path}: is not a JSON object")
    return values


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    try:
        write_files([FileWrite(str(path), _json_bytes(values))])
    except OSError as error:
        raise RecordError(f"{path}: cannot be written: {error.strerror}") from None


def _json_bytes(values: Mapping[str, Any]) -> bytes:
    import json

    return (json.dumps(values, indent=1) + "\n").encode()

"""RunRecord: the history of one run (``run.json``), the source of truth.

Written to a temporary file and renamed, mode 0600, so that readers never see half a file.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl import __version__
from llmctl.backends.base import SubmittedJob
from llmctl.errors import RecordError
from llmctl.transport.file_reads import FileRead
from llmctl.transport.file_writes import FileWrite

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
    "contents": (str, _MAYBE),
    "predicted": (dict, _MAYBE),
}
_PREDICTED_TYPES: Mapping[str, tuple[type, ...]] = {
    "iteration_time_s": _NUMBER,
    **dict.fromkeys(("peak_memory_bytes", "calibrated_by"), (int,)),
    "device": (str,),
}
_JOB_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("host", "job_id"), (str,)),
    **dict.fromkeys(("pid", "pid_start_time"), (int, _MAYBE)),
    "boot_id": (str, _MAYBE),
}


@dataclass(frozen=True)
class PredictedStep:
    """Prediction for a training at its submission.

    Attributes:
        iteration_time_s: seconds of an iteration.
        peak_memory_bytes: of the rank that needs most.
        device: by name, whose speeds were taken.
        calibrated_by: number of runs that the prediction was calibrated by.
    """

    iteration_time_s: float
    peak_memory_bytes: int
    device: str
    calibrated_by: int


@dataclass(frozen=True)
class Submission:
    """One handing-over of a run to its cluster.

    Attributes:
        number: 1 for the first, increasing with every resume.
        time: seconds since 1970.
        jobs: the submitted jobs; empty between recording and acceptance.
        cancel_requested: time of the first ``llmctl cancel``; None before.
        hosts: machines that llmctl chose, the head first; empty if a scheduler chooses, or in old records.
        contents: sha256 of the file of checksums of all that the job runs; None in records without this field.
        predicted: None for a COMMAND, without a prediction, and in records without this field.
    """

    number: int
    time: float
    jobs: tuple[SubmittedJob, ...] = ()
    cancel_requested: float | None = None
    hosts: tuple[str, ...] = ()
    contents: str | None = None
    predicted: PredictedStep | None = None


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
        owner: name of another user who owns run.json or its folder; empty for a run of this user. Not in run.json.
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
    owner: str = ""

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
    def load_own(cls, run_dir: Path, transport: "Transport") -> "RunRecord":
        """Load the record of a run that is about to be changed, joined or run again.

        Raises:
            RecordError: the record cannot be read; or another user has made a file of the run, or may change it.
            SchedulerError: the machine cannot be reached.
        """
        record = cls.load(run_dir, transport)
        if record.run_id != run_dir.name:
            raise RecordError(f"{run_dir}: holds the record of another run, {record.run_id}")
        last = record.submissions[-1] if record.submissions else None
        contents = (last.number, last.contents) if last is not None and last.contents is not None else None
        reason = transport.why_distrusted(str(run_dir), contents)
        if reason:
            raise RecordError(f"{record.run_id} cannot be trusted: {reason}")
        return record

    @classmethod
    def of_json(cls, run_dir: Path, text: bytes, owner: str = "") -> "RunRecord":
        """Parse ``text``, the run.json of ``run_dir``, which belongs to ``owner`` unless that is empty.

        Raises:
            RecordError: the text is damaged, or not a record, or has keys of a newer llmctl.
        """
        path = run_dir / "run.json"
        values = parse_json(path, text)
        try:
            if values["schema"] != SCHEMA:
                raise RecordError(f"{path}: schema {values['schema']} is unknown to this llmctl; use a newer llmctl")
            known = cls.__dataclass_fields__.keys() - {"owner"} | {"schema"}
            if unknown := [*sorted(values.keys() - known), *_unknown_below(values["submissions"])]:
                raise newer_record(run_dir, unknown, values.get("llmctl_version"))
            values = {"cwd": None, "template": None, **values, "owner": owner}
            fields = {name: values[name] for name in cls.__dataclass_fields__}
            check_types(values, _RECORD_TYPES)
            if not RUN_ID.fullmatch(values["run_id"]):
                raise TypeError(f"run_id cannot be {values['run_id']!r}")
            check_types(values["config"] or {}, dict.fromkeys(values["config"] or {}, (dict,)))
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
        values = {"schema": SCHEMA, **asdict(self), "run_dir": str(self.run_dir)}
        del values["owner"]
        return json_bytes(values)

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
    parts = transport.read_parts([FileRead(path, limit=_LIMIT, asks_owner=True) for path in paths])
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
            found.append(RunRecord.of_json(run_dir, part.data, part.owner))
        except RecordError as error:
            found.append(error)
    return found


def new_run_id(name: str, local_time: str) -> str:
    """``<name>-<yymmdd>-<hhmmss>-<4 hex>``. Creating the run directory, not chance, guarantees uniqueness.

    Args:
        name: the run's name.
        local_time: ``yymmdd-hhmmss``.
    """
    return f"{name}-{local_time}-{os.urandom(2).hex()}"


def newer_record(run_dir: Path, unknown: Sequence[str], version: object) -> RecordError:
    """Error for the record of a run with keys that only a newer llmctl knows.

    Args:
        run_dir: of the run.
        unknown: the keys.
        version: of llmctl at the run's first submission, as the record has it.
    """
    keys = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
    which = "these keys" if len(unknown) > 1 else "this key"
    is_other = isinstance(version, str) and version != __version__
    writer = f"llmctl {version}, which submitted the run, or " if is_other else ""
    return RecordError(
        f"{run_dir / 'run.json'}: llmctl {__version__} does not know {which} of the record: {keys}; "
        f"use {writer}a newer llmctl"
    )


def _unknown_below(submissions: Any) -> Iterator[str]:
    """Keys of submissions and their jobs that this llmctl does not know; of values of any type."""
    entries = [entry for entry in submissions if isinstance(entry, dict)] if isinstance(submissions, list) else []
    jobs = [job for entry in entries if isinstance(entry.get("jobs"), list) for job in entry["jobs"]]
    predicted = [entry["predicted"] for entry in entries if "predicted" in entry]
    levels = (("", entries, Submission), (".jobs", jobs, SubmittedJob), (".predicted", predicted, PredictedStep))
    for name, found, known in levels:
        keys = {key for values in found if isinstance(values, dict) for key in values}
        yield from (f"submissions{name}.{key}" for key in sorted(keys - known.__dataclass_fields__.keys()))


def _submission_of(values: Mapping[str, Any]) -> Submission:
    values = {"contents": None, "hosts": [], "predicted": None, **values}
    check_types(values, _SUBMISSION_TYPES)
    for job in values["jobs"]:
        check_types(job, _JOB_TYPES)
    predicted = None
    if values["predicted"] is not None:
        check_types(values["predicted"], _PREDICTED_TYPES)
        predicted = PredictedStep(**values["predicted"])
    jobs = tuple(SubmittedJob(**job) for job in values["jobs"])
    hosts = tuple(map(str, values["hosts"]))
    return Submission(**{**values, "jobs": jobs, "hosts": hosts, "predicted": predicted})


def check_types(values: Any, types: Mapping[str, tuple[type, ...]]) -> None:
    """Raise TypeError for a value of an unexpected type, KeyError for a missing value."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{values!r} is not an object")
    for key, allowed in types.items():
        if not isinstance(values[key], allowed):
            raise TypeError(f"{key} cannot be {values[key]!r}")


def parse_json(path: str | Path, text: bytes) -> dict[str, Any]:
    """Parse the object in ``text``, the content of ``path``.

    Raises:
        RecordError: the text is not a JSON object.
    """
    import json

    try:
        values = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}: is damaged: {error}") from None
    if not isinstance(values, dict):
        raise RecordError(f"{path}: is not a JSON object")
    return values


def json_bytes(values: Mapping[str, Any]) -> bytes:
    """Encode an object as the content of a file."""
    import json

    return (json.dumps(values, indent=1) + "\n").encode()

"""RunIndex: the locations of this user's runs, and the states last seen.

A cache: it can be rebuilt by listing runs_root. Its files are written aside and renamed, mode 0600.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.errors import RecordError
from llmctl.runs.record import RUN_ID, RecordAbsent, RunRecord, check_types, json_bytes, load_records, parse_json
from llmctl.transport.file_writes import FileWrite, write_files

if TYPE_CHECKING:
    from llmctl.transport.protocol import Transport

_NUMBER = (int, float)
_BLOCK = 1 << 14
"""Bytes of one read: an entry has a few hundred."""
_ENTRY_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("run_id", "name", "cluster", "run_dir"), (str,)),
    "created": _NUMBER,
    "job_ids": (list,),
}


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
        return self._entries_with("")

    def find(self, reference: str) -> IndexEntry:
        """Find a run by run id or its unique prefix, newest name, or job id.

        Raises:
            RecordError: no run matches, or several do; lists the candidates.
        """
        # A whole run id comes first, and needs no look at the other runs, of which there may be thousands.
        whole = self._entry(self._path(reference)) if RUN_ID.fullmatch(reference) else None
        if whole is not None and whole.run_id == reference:
            return whole
        entries = self._entries_with(reference)
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
        entries = self.entries()
        known = f"; the newest are {_names(entries)}" if entries else "; there is no run yet: llmctl submit starts one"
        raise RecordError(f"no run is called {reference!r}{known}")

    def beginning_with(self, beginning: str, limit: int) -> list[IndexEntry]:
        """The runs whose ids begin so, newest first; reads the files of at most ``limit`` runs, by their file times."""
        with suppress(FileNotFoundError), os.scandir(self.folder) as found:
            files = [file for file in found if file.name.startswith(beginning) and file.name.endswith(".json")]
            if len(files) > limit:
                files = sorted(files, key=lambda file: file.stat().st_mtime)[-limit:]
            entries = [entry for file in files if (entry := self._entry(file.path)) is not None]
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

    def _entries_with(self, text: str) -> list[IndexEntry]:
        """The runs in whose files ``text`` stands, oldest first. The other files, mostly thousands, are not parsed."""
        import json

        wanted = json.dumps(text)[1:-1].encode()
        found = []
        with suppress(FileNotFoundError), os.scandir(self.folder) as files:
            for file in files:
                if file.name.endswith(".json") and (entry := self._entry(file.path, wanted)) is not None:
                    found.append(entry)
        return sorted(found, key=lambda entry: (entry.created, entry.run_id))

    def _entry(self, path: str | Path, wanted: bytes = b"") -> IndexEntry | None:
        """The run of a file; None if the file cannot be read, or has not the ``wanted`` bytes."""
        try:
            text = _bytes_of(path)
            if wanted not in text:
                return None
            values = parse_json(path, text)
            check_types(values, _ENTRY_TYPES)
            # A newer llmctl may have added keys.
            known = {key: value for key, value in values.items() if key in IndexEntry.__dataclass_fields__}
            return IndexEntry(**{**known, "run_dir": Path(values["run_dir"]), "job_ids": tuple(values["job_ids"])})
        except (OSError, RecordError, KeyError, TypeError):
            return None

    def _write(self, entry: IndexEntry) -> None:
        _write_json(self._path(entry.run_id), {**asdict(entry), "run_dir": str(entry.run_dir)})


def _bytes_of(path: str | Path) -> bytes:
    """Content of a file. Half the time of ``Path.read_bytes``, which counts for thousands of files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = block = os.read(descriptor, _BLOCK)
        while len(block) == _BLOCK:
            block = os.read(descriptor, _BLOCK)
            text += block
        return text
    finally:
        os.close(descriptor)


def _entry_of(record: RunRecord) -> IndexEntry:
    ids = tuple(job.job_id for submission in record.submissions for job in submission.jobs)
    return IndexEntry(record.run_id, record.name, record.cluster, record.run_dir, record.created, ids)


def _names(entries: Iterable[IndexEntry]) -> str:
    names = [entry.run_id for entry in entries][::-1]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    try:
        write_files([FileWrite(str(path), json_bytes(values))])
    except OSError as error:
        raise RecordError(f"{path}: cannot be written: {error.strerror}") from None

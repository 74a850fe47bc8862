"""Removal of the large files of an ended run. Its record, config, metrics and logs stay."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmctl.context import ClusterSession, Context
from llmctl.operate.resume import check_ended
from llmctl.runs.index import IndexEntry
from llmctl.runs.record import RunRecord

_LARGE = ("checkpoints", "code")
"""Folders of llmctl and its trainer. All else in a run directory stays: a COMMAND may have written results there."""
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Removable:
    """The files of one run that can go.

    Attributes:
        entry: of the index.
        session: of the run's cluster.
        paths: absolute, on the cluster's machine.
        kib: their size on disk; None if it could not be measured.
        elsewhere: folder of checkpoints outside the run directory, which stays; None without one.
    """

    entry: IndexEntry
    session: ClusterSession
    paths: tuple[str, ...]
    kib: int | None
    elsewhere: str | None


def find_removable(context: Context, reference: str) -> Removable:
    """The large files of an ended run of this user.

    Raises:
        RecordError: no run matches, the run is another user's, or it has not ended.
        SchedulerError: the cluster cannot be reached.
    """
    entry = context.index.find(reference)
    session = ClusterSession.of(context, entry.cluster, f"run {entry.run_id}")
    record = RunRecord.load_own(entry.run_dir, session.transport)
    check_ended(record, session)
    (names,) = session.transport.list_names([str(record.run_dir)])
    paths = [f"{record.run_dir}/{name}" for name in _LARGE if name in names]
    save = ((record.config or {}).get("checkpoint") or {}).get("save")
    return Removable(entry, session, tuple(paths), _size(session, paths), save)


def remove_files(found: Removable) -> list[str]:
    """Remove the files of an ended run; returns those that could not be removed.

    Raises:
        RecordError: the run has been started again.
        SchedulerError: the cluster cannot be reached.
    """
    transport, run_dir = found.session.transport, found.entry.run_dir
    with transport.lock(f"{run_dir}/.lock"):
        check_ended(RunRecord.load_own(run_dir, transport), found.session)
        transport.remove(found.paths)
        facts = transport.stat_paths(found.paths)
    return [path for path, fact in zip(found.paths, facts, strict=True) if fact.kind]


def _size(session: ClusterSession, paths: Sequence[str]) -> int | None:
    """KiB on disk. A link counts as itself."""
    if not paths:
        return 0
    answer = session.transport.run(["du", "-skc", "--", *paths], timeout_s=_TIMEOUT_S, only_reads=True)
    last = answer.stdout.splitlines()[-1:] if answer.stdout else []
    words = last[0].split() if last else []
    return int(words[0]) if len(words) == 2 and words[0].isdecimal() else None

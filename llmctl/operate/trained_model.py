"""The trained model that a command names: a run, or a folder."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmctl.context import ClusterSession, Context, is_remote
from llmctl.errors import UsageError
from llmctl.runs.record import RunRecord


@dataclass(frozen=True)
class RunModel:
    """Model of a run.

    Attributes:
        cluster: cluster of the run.
        folder: the folder that holds its checkpoints.
        modules: folder of the user's modules that its tokenizer is in; None for a tokenizer of files.
    """

    cluster: str
    folder: Path
    modules: Path | None = None


def find_trained_model(context: Context, source: str, cluster: str | None) -> RunModel | None:
    """The run that ``source`` names; None if it is a path.

    Args:
        context: this call of llmctl.
        source: run id, its beginning, name or job id; or a path.
        cluster: as typed; None without --cluster.

    Raises:
        RecordError: there is neither such a file nor such a run, or the run's record cannot be read.
        UsageError: the run is on another cluster.
    """
    if not _names_a_run(context, source, *context.cluster(cluster)):
        return None
    entry = context.index.find(source)
    if cluster not in (None, entry.cluster):
        raise UsageError(f"--cluster {cluster}: run {source} is on {entry.cluster}; leave the flag out")
    session = ClusterSession.of(context, entry.cluster, f"run {entry.run_id}")
    record = RunRecord.load(entry.run_dir, session.transport)
    config = record.config or {}
    save = (config.get("checkpoint") or {}).get("save")
    has_own = bool((config.get("data") or {}).get("tokenizer_function")) and bool(record.job.get("code"))
    modules = entry.run_dir / "code" / "user" if has_own else None
    return RunModel(entry.cluster, Path(save) if save else entry.run_dir, modules)


def with_source(words: Sequence[str], source: str, folder: Path, valued: Collection[str]) -> list[str]:
    """The words with ``source`` replaced by ``folder``, but not where it is the value of a flag of ``valued``."""
    before = ["", *words]
    place = next(i for i, word in enumerate(words) if word == source and before[i] not in valued)
    return [*words[:place], str(folder), *words[place + 1 :]]


def _names_a_run(context: Context, source: str, cluster: str, origin: str) -> bool:
    """True if ``source`` is not a path: it has no slash, and no such file exists here."""
    if os.sep in source or source in (".", "..", "~"):
        return False
    if (context.cwd / source).exists():
        return False
    # On another machine a bare name may be a folder in the home directory.
    return not is_remote(context.profile(cluster, origin)) or _is_known(context, source)


def _is_known(context: Context, reference: str) -> bool:
    return any(reference in (entry.run_id, entry.name, *entry.job_ids) for entry in context.index.entries())

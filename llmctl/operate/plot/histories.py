"""Metrics of runs, read through the transports of their clusters."""

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from llmctl.context import ClusterSession, Context
from llmctl.errors import RecordError, UsageError
from llmctl.operate.plot.charts import LOSS, VALIDATION, Chart
from llmctl.operate.survey import load_records
from llmctl.runs.index import IndexEntry
from llmctl.runs.series.history import RunHistory
from llmctl.runs.series.reading import MetricsSource, read_histories, read_history


def read_runs(context: Context, entries: Sequence[IndexEntry], keys: Sequence[str]) -> dict[str, RunHistory]:
    """Name -> metrics of each run; the run id where two runs have one name.

    Raises:
        RecordError: the record of a run cannot be read.
        ProfileError: the cluster of a run has no profile any more.
        SchedulerError: a cluster cannot be reached.
    """
    found = [_source(context, entry) for entry in entries]
    names, sources = [name for name, _ in found], [source for _, source in found]
    histories = read_histories(sources, [*keys, VALIDATION] if LOSS in keys else keys)
    unique = [name if names.count(name) == 1 else entry.run_id for name, entry in zip(names, entries, strict=True)]
    return dict(zip(unique, histories, strict=True))


def read_columns(
    context: Context, entry: IndexEntry, keys: Sequence[str], *, validation: bool
) -> dict[str, list[float]]:
    """Columns of the rows of one run that count, each iteration once; starts no other process.

    Args:
        context: this call of llmctl.
        entry: the run.
        keys: keys or patterns of keys; ``iteration`` and ``attempt`` are always there.
        validation: the rows of validations instead of those of training.

    Raises:
        RecordError, ProfileError, SchedulerError: see read_runs.
    """
    history = read_history(_source(context, entry)[1], keys)
    rows = history.rows.of_validation() if validation else history.rows.of_training()
    asked = {key: column.tolist() for key, column in rows.values.items() if any(fnmatchcase(key, one) for one in keys)}
    numbers = {key: column for key, column in asked.items() if not all(map(math.isnan, column))}
    return {"iteration": [*rows.iteration], "attempt": [*rows.attempt], **numbers}


def _source(context: Context, entry: IndexEntry) -> tuple[str, MetricsSource]:
    """Name and metrics file of a run."""
    session = ClusterSession.of(context, entry.cluster, f"run {entry.run_id}")
    (record,) = load_records([entry], session)
    if isinstance(record, RecordError):
        raise record
    return record.name, MetricsSource(f"{record.run_dir}/metrics.jsonl", session.transport.read_parts)


def check_keys(
    context: Context,
    entries: Sequence[IndexEntry],
    keys: Sequence[str],
    histories: Mapping[str, RunHistory],
    found: Sequence[Chart],
) -> None:
    """Refuse keys that no run has, and runs without metrics.

    Raises:
        UsageError: names them, and the keys that there are.
    """
    if empty := [name for name, history in histories.items() if not len(history.rows)]:
        raise UsageError(f"{', '.join(empty)}: has no metrics: a COMMAND, or a training that has made no step yet")
    missing = [key for key in keys if key not in {chart.key for chart in found}]
    if not missing:
        return
    everything = read_runs(context, entries, ["*"])
    there = sorted({key for history in everything.values() for key in history.rows.values if key != "time"})
    if all(key in there for key in missing):
        raise UsageError(f"--log: {', '.join(missing)}: has no positive number; leave --log out")
    raise UsageError(f"--key {', '.join(missing)}: no run has it; there are {', '.join(there)}")

"""Metrics of the runs of a plot, read through the transports of their clusters."""

from collections.abc import Mapping, Sequence

from llmctl.context import ClusterSession, Context
from llmctl.errors import RecordError, UsageError
from llmctl.operate.plot.charts import LOSS, VALIDATION, Chart
from llmctl.operate.survey import load_records
from llmctl.runs.index import IndexEntry
from llmctl.runs.series.history import RunHistory
from llmctl.runs.series.reading import MetricsSource, read_histories


def read_runs(context: Context, entries: Sequence[IndexEntry], keys: Sequence[str]) -> dict[str, RunHistory]:
    """Name -> metrics of each run; the run id where two runs have one name.

    Raises:
        RecordError: the record of a run cannot be read.
        ProfileError: the cluster of a run has no profile any more.
        SchedulerError: a cluster cannot be reached.
    """
    names, sources = [], []
    for entry in entries:
        session = ClusterSession.of(context, entry.cluster, f"run {entry.run_id}")
        (record,) = load_records([entry], session)
        if isinstance(record, RecordError):
            raise record
        names.append(record.name)
        sources.append(MetricsSource(f"{record.run_dir}/metrics.jsonl", session.transport.read_parts))
    histories = read_histories(sources, [*keys, VALIDATION] if LOSS in keys else keys)
    unique = [name if names.count(name) == 1 else entry.run_id for name, entry in zip(names, entries, strict=True)]
    return dict(zip(unique, histories, strict=True))


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

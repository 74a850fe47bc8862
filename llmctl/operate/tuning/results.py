"""The results of a tuning, from the files of its run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import TypedDict

from llmctl.context import ClusterSession
from llmctl.errors import RecordError
from llmctl.operate.tuning.plan import FILE
from llmctl.runs.record import RunRecord, parse_json
from llmctl.transport.file_reads import FileRead
from trainer.config.errors import ConfigError
from trainer.planning.build_config import build_config
from trainer.planning.estimate.plan import changed

_RESULTS = "tune.jsonl"
_LIMIT = 1 << 24


class TuneRow(TypedDict):
    """One layout."""

    layout: str
    """In words."""
    settings: dict[str, Any]
    """Dotted keys of the config, as --set takes them."""
    outcome: str | None
    """ok, out_of_memory or failed, of its last trial; null: it was not tried."""
    rounds: int
    """Trials that it had."""
    iteration_time_s: float | None
    """Median time of a step in its last trial."""
    tokens_per_s: float | None
    """Tokens per second of all devices, measured."""
    peak_memory_bytes: int | None
    """Highest peak memory of a rank, measured."""
    predicted_iteration_time_s: float
    """Time of a step as ``llmctl plan`` predicts it."""
    predicted_peak_memory_bytes: int
    """Peak memory of a rank, predicted."""
    reason: str
    """Reason of a failure; else empty."""


class TuneDocument(TypedDict):
    """The facts of a tuning."""

    run_id: str
    """The run."""
    cluster: str
    """Name of the profile."""
    nodes: int
    """Number of nodes."""
    devices: int
    """Number of ranks."""
    rows: list[TuneRow]
    """The layouts: the fastest of the last round first, at the end those that failed or were not tried."""


@dataclass(frozen=True)
class TuneResults:
    """A tuning's files, read.

    Attributes:
        document: the rows.
        given: what the job was asked for.
    """

    document: TuneDocument
    given: Mapping[str, Any]

    def best_config(self) -> dict[str, Any] | None:
        """The user's config with the fastest layout; None: none ran."""
        rows = self.document["rows"]
        if not rows or rows[0]["iteration_time_s"] is None:
            return None
        own = {**self.given["own"], "job": {"nodes": self.document["nodes"]}}
        return changed(build_config(own), rows[0]["settings"]).model_dump(mode="json", exclude_unset=True)


def read_results(record: RunRecord, session: ClusterSession) -> TuneResults:
    """Read the results that there are.

    Raises:
        RecordError: the run does not come from ``llmctl tune``, or a file is damaged.
        SchedulerError: the machine cannot be reached.
    """
    paths = [f"{record.run_dir}/{name}" for name in (FILE, _RESULTS)]
    given_part, results_part = session.transport.read_parts([FileRead(path, limit=_LIMIT) for path in paths])
    if given_part is None:
        raise RecordError(f"{paths[0]}: is missing: {record.run_id} does not come from llmctl tune")
    given = parse_json(paths[0], given_part.data)
    lines = [] if results_part is None else results_part.data.splitlines(keepends=True)
    try:
        results = [parse_json(paths[1], line) for line in lines if line.endswith(b"\n")]
        tokens = _tokens_per_step(given)
        document: TuneDocument = {
            "run_id": record.run_id,
            "cluster": record.cluster,
            "nodes": given["nodes"],
            "devices": given["nodes"] * given["ranks_per_node"],
            "rows": _rows(given["candidates"], results, tokens),
        }
    except (KeyError, TypeError, IndexError, ConfigError) as error:
        raise RecordError(f"{paths[1]}: is damaged: {error}") from None
    return TuneResults(document, given)


def _tokens_per_step(given: Mapping[str, Any]) -> int:
    config = build_config(given["config"])
    world = given["nodes"] * given["ranks_per_node"]
    return config.global_batch_size(config.data_parallel_size(world)) * config.tokens_per_sample


def _rows(candidates: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]], tokens: int) -> list[TuneRow]:
    rows: list[TuneRow] = []
    for number, candidate in enumerate(candidates):
        own = [result for result in results if result["candidate"] == number]
        last = own[-1] if own else None
        seconds = None if last is None else last["seconds"]
        rows.append(
            {
                "layout": candidate["name"],
                "settings": candidate["settings"],
                "outcome": None if last is None else last["outcome"],
                "rounds": len(own),
                "iteration_time_s": seconds,
                "tokens_per_s": None if seconds is None else tokens / seconds,
                "peak_memory_bytes": None if last is None else last["bytes"],
                "predicted_iteration_time_s": candidate["seconds"],
                "predicted_peak_memory_bytes": candidate["bytes"],
                "reason": "" if last is None else last["reason"],
            }
        )
    return sorted(rows, key=_order)


def _order(row: TuneRow) -> tuple[bool, int, float]:
    seconds = row["iteration_time_s"]
    return seconds is None, -row["rounds"] if seconds is not None else 0, seconds or row["predicted_iteration_time_s"]

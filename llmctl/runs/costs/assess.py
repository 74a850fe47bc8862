"""The costs of a run and the advice on its saves, from its files and those of other runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmctl.runs.costs.attempt_files import AttemptFiles
from llmctl.runs.costs.save_interval import RANDOM_CLASSES, FaultCount, SaveAdvice, advise
from llmctl.runs.costs.time_split import RunCosts, split_time
from llmctl.runs.record import RunRecord
from llmctl.runs.series.history import AttemptRows

_DAY_S = 86400.0


def assess(
    record: RunRecord,
    attempts: Sequence[AttemptFiles],
    rows: Mapping[int, AttemptRows],
    *,
    is_running: bool,
    step_s: float | None,
    others: Callable[[], FaultCount],
) -> RunCosts:
    """The costs of a run.

    Args:
        record: of the run.
        attempts: of the run, in order.
        rows: number of an attempt -> its rows.
        is_running: the last attempt has not ended.
        step_s: present seconds of an iteration; None if unknown.
        others: gives the faults of other runs on the cluster; asked only if a save was measured.
    """
    is_training = record.config is not None
    costs = split_time(
        record.run_id, attempts, rows, record.submissions, is_running=is_running, is_training=is_training
    )
    blocked = [seconds for each in rows.values() for seconds in each.blocked_s]
    if not blocked or not step_s:
        return costs
    written = [seconds for each in rows.values() for seconds in each.written_s]
    return replace(costs, save=_advice(record, step_s, blocked, written, count_faults(record, attempts), others))


def _advice(
    record: RunRecord,
    step_s: float,
    blocked: Sequence[float],
    written: Sequence[float],
    own: FaultCount,
    others: Callable[[], FaultCount],
) -> SaveAdvice | None:
    config: Mapping[str, Any] = record.config or {}
    train_iters = config.get("training", {}).get("train_iters")
    if not isinstance(train_iters, int):
        return None
    interval = config.get("checkpoint", {}).get("save_interval")
    nodes = int(record.job.get("nodes") or 1)
    return advise(interval, train_iters, nodes, step_s, blocked, written, own + others())


def count_faults(record: RunRecord, attempts: Sequence[AttemptFiles]) -> FaultCount:
    """Attempts of a run that a fault of the machines ended, and its node-days.

    An attempt counts, too, if another follows and its supervisor had no time to record an end.
    """
    nodes, faults, seconds = int(record.job.get("nodes") or 1), 0, 0.0
    for attempt in attempts:
        began, ended = attempt.span or (0.0, 0.0)
        seconds += ended - began
        ending = attempt.ending
        is_cut_off = ending is None and attempt is not attempts[-1] and "cancel" not in attempt.names
        faults += is_cut_off or (ending is not None and ending.failure_class in RANDOM_CLASSES)
    return FaultCount(faults, nodes * seconds / _DAY_S)

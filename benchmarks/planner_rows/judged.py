"""Errors of the predictions, by source."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.planner_rows.published import SOURCES, NotExpressedError, PublishedRun

LEAST_GROUP = 5
"""Runs of a group whose order is compared."""
OWN = "llmctl"
"""Source of the trainer's own runs."""
LOW = 0.05
"""Share by which a predicted memory may be too low."""


@dataclass(frozen=True)
class JudgedRun:
    """A row with its prediction.

    Attributes:
        run: the row.
        left_out: the reason why nothing is predicted; empty: something is.
        predicted_s: seconds of an iteration.
        measured_s: as the source has them; None: it does not say, or the run ended by its memory.
        predicted_gb: of the fullest rank, in 10^9 bytes; of its tensors where the source counts these.
        measured_gb: what the source calls GB; None: it does not say.
        fits: the prediction's answer.
        tight: it fits, with little room.
        room: memory of the device by the prediction.
    """

    run: PublishedRun
    left_out: str = ""
    predicted_s: float = 0.0
    measured_s: float | None = None
    predicted_gb: float = 0.0
    measured_gb: float | None = None
    fits: bool = False
    tight: bool = False
    room: float = 0.0

    @property
    def ran(self) -> bool:
        """True if the source reports a run, not its crash."""
        return not self.run.outcome

    @property
    def time_error(self) -> float | None:
        """Predicted by measured time, less 1; None: nothing was measured."""
        return None if self.measured_s is None else self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float | None:
        """Predicted by measured memory, less 1; None: nothing was measured."""
        return None if self.measured_gb is None else self.predicted_gb / self.measured_gb - 1


def judge(run: PublishedRun) -> JudgedRun:
    """Predict a row."""
    try:
        plan = run.plan()
    except NotExpressedError as error:
        return JudgedRun(run, left_out=str(error))
    return JudgedRun(
        run,
        predicted_s=plan.step.total,
        measured_s=run.seconds(plan.config),
        predicted_gb=(plan.worst.tensors if SOURCES[run.source].counts_tensors else plan.worst.total) / 1e9,
        measured_gb=float(run.memory_gb) if run.memory_gb else None,
        fits=plan.fits,
        tight=plan.is_tight,
        room=plan.device.memory / plan.worst.total,
    )


@dataclass(frozen=True)
class Judgement:
    """Errors of some rows. Medians are None without a row that they are of.

    Attributes:
        rows: number of rows, with those left out.
        predicted: number of rows that have a prediction.
        times: errors of the time.
        memories: errors of the memory.
        fitting: of the rows that ran, those that are said to fit, and all.
        false_fits: of the rows that did not run, those that are said to fit and not to be tight, and all.
        orders: rank correlation of predicted and measured time of each group of at least LEAST_GROUP runs.
    """

    rows: int
    predicted: int
    times: Sequence[float]
    memories: Sequence[float]
    fitting: tuple[int, int]
    false_fits: tuple[int, int]
    orders: Sequence[float]

    @classmethod
    def of(cls, rows: Sequence[JudgedRun]) -> Judgement:
        """Judge ``rows``."""
        known = [row for row in rows if not row.left_out]
        ran, crashed = [row for row in known if row.ran], [row for row in known if not row.ran]
        return cls(
            len(rows),
            len(known),
            [row.time_error for row in known if row.time_error is not None],
            [row.memory_error for row in known if row.memory_error is not None],
            (sum(row.fits for row in ran), len(ran)),
            (sum(row.fits and not row.tight for row in crashed), len(crashed)),
            list(_orders(ran)),
        )

    @property
    def low(self) -> int:
        """Rows whose memory is predicted too low by more than LOW."""
        return sum(error < -LOW for error in self.memories)


def by_source(rows: Sequence[JudgedRun]) -> dict[str, Judgement]:
    """The judgement of each source, and of ``all``."""
    found = {name: [row for row in rows if row.run.source == name] for name in SOURCES}
    return {name: Judgement.of(own) for name, own in {**found, "all": list(rows)}.items()}


def residual(rows: Sequence[JudgedRun]) -> float | None:
    """95th percentile of measured by predicted memory, by nearest rank; None: nothing was measured."""
    found = sorted(1 / (1 + row.memory_error) for row in rows if row.memory_error is not None)
    return found[math.ceil(0.95 * len(found)) - 1] if found else None


def safety_margin(rows: Sequence[JudgedRun]) -> float:
    """Memory that a device should have, by the predicted peak, in steps of 0.05.

    The least that covers the residuals of the trainer's own runs, and with which no run that failed is said to fit. Of
    others' trainers only the failures count: what their kernels keep beside is not a residual of this one.
    """
    own = residual([row for row in rows if row.run.source == OWN]) or 1.0
    failed = [row.room for row in rows if not row.left_out and not row.ran and row.fits]
    return math.ceil(20 * max([own, *failed]) - 1e-9) / 20


def absolute(errors: Sequence[float]) -> float:
    """Median absolute error."""
    return median(map(abs, errors))


def _orders(rows: Sequence[JudgedRun]) -> Iterator[float]:
    groups = defaultdict(list)
    for row in rows:
        if row.measured_s is not None:
            groups[row.run.group].append((row.predicted_s, row.measured_s))
    for pairs in groups.values():
        if len(pairs) >= LEAST_GROUP:
            predicted, measured = zip(*pairs, strict=True)
            yield rank_correlation(predicted, measured)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's coefficient: the correlation of the ranks, where equal numbers share theirs."""
    ranks = [_ranks(first), _ranks(second)]
    middle = (len(first) - 1) / 2
    covariance = sum((a - middle) * (b - middle) for a, b in zip(*ranks, strict=True))
    spread = [sum((rank - middle) ** 2 for rank in own) ** 0.5 for own in ranks]
    return covariance / (spread[0] * spread[1]) if spread[0] and spread[1] else 0.0


def _ranks(numbers: Sequence[float]) -> list[float]:
    return [
        sum(other < number for other in numbers) + (sum(other == number for other in numbers) - 1) / 2
        for number in numbers
    ]

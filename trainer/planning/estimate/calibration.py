"""Factors that make predictions meet measured runs, found by least squares. Torch-free.

A factor stands for a term of the time: 1.2 of products says that they take 1.2 times as long as the data sheet's share
lets one expect. The sum of squared logarithms of predicted by measured time is made as small as possible, with a
penalty on factors away from 1, so that a term that the runs do not determine stays as it was. Runs that no factors
explain count less and less (Huber 1964, doi:10.1214/aoms/1177703732), so that one broken run spoils nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import exp, log
from statistics import median
from typing import TYPE_CHECKING

from trainer.planning.estimate.links import Links
from trainer.planning.estimate.memory import memory_of_ranks
from trainer.planning.estimate.speed import step_seconds

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig
    from trainer.planning.estimate.devices import Device

_PENALTY = 0.02
"""Weight of a factor's logarithm beside an error's: errors of 5% count as much as factors of 35%."""
_OUTLIER = 0.15
"""Logarithm of an error from which on a run counts less."""
_ROUNDS, _SWEEPS, _STEP = 8, 50, 0.05
_SMALL = 0.005
_LARGEST = log(8.0)
_MOST_FRAGMENTS = 1.0


@dataclass(frozen=True)
class Factors:
    """Time of each term, in times of the uncalibrated one, and memory.

    Attributes:
        products: matrix products.
        attention: attention without its products with weights.
        memory: memory-bound ops and the optimizer.
        within: messages within a node.
        between: messages between nodes.
        host: starts of kernels.
        fragments: share of activations and logits that the allocator loses; None: as without calibration.
    """

    products: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    within: float = 1.0
    between: float = 1.0
    host: float = 1.0
    fragments: float | None = None

    def of(self, device: Device) -> Device:
        """``device`` with these factors."""
        overhead = device.overhead
        if self.fragments is not None:
            overhead = replace(overhead, fragments=self.fragments)
        return replace(
            device,
            product_share=device.product_share / self.products,
            attention_share=device.attention_share / self.attention,
            flash_share=device.flash_share / self.attention,
            bandwidth=device.bandwidth / self.memory,
            within=device.within / self.within,
            between=device.between / self.between,
            host=device.host * self.host,
            overhead=overhead,
        )


TERMS = tuple(each.name for each in fields(Factors) if each.name != "fragments")


@dataclass(frozen=True)
class MeasuredRun:
    """A run on one kind of device.

    Attributes:
        config: of the run.
        vocabulary: number of token ids.
        nodes: number of nodes.
        per_node: devices of a node.
        seconds: of an iteration in the middle of the run; None: unknown.
        bytes: peak of the rank that took most; None: unknown.
    """

    config: TrainConfig
    vocabulary: int
    nodes: int
    per_node: int
    seconds: float | None
    bytes: int | None = None

    def predicted_seconds(self, device: Device) -> float:
        """Predicted seconds of an iteration."""
        return step_seconds(self.config, self.vocabulary, self.nodes * self.per_node, Links(self.per_node, device))


def calibrate(runs: Sequence[MeasuredRun], device: Device) -> Factors:
    """The factors with which predictions for ``runs`` on ``device`` come nearest to what was measured."""
    timed = [run for run in runs if run.seconds is not None]
    logs = [0.0] * len(TERMS)
    for _ in range(_ROUNDS if timed else 0):
        errors = _errors(timed, device, logs)
        # How the errors change with each factor.
        slopes = [
            [(more - error) / _STEP for more, error in zip(_errors(timed, device, moved), errors, strict=True)]
            for moved in (_moved(logs, term) for term in range(len(TERMS)))
        ]
        weights = [min(1.0, _OUTLIER / abs(error)) if error else 1.0 for error in errors]
        before, logs = logs, _next(logs, errors, slopes, weights)
        if all(abs(new - old) < _SMALL for new, old in zip(logs, before, strict=True)):
            break
    return replace(Factors(**dict(zip(TERMS, map(exp, logs), strict=True))), fragments=_fragments(runs, device))


def _moved(logs: list[float], term: int) -> list[float]:
    return [value + _STEP * (place == term) for place, value in enumerate(logs)]


def _errors(runs: Sequence[MeasuredRun], device: Device, logs: list[float]) -> list[float]:
    """Logarithms of predicted by measured time."""
    own = Factors(**dict(zip(TERMS, map(exp, logs), strict=True))).of(device)
    return [log(run.predicted_seconds(own) / run.seconds) for run in runs if run.seconds is not None]


def _next(logs: list[float], errors: list[float], slopes: list[list[float]], weights: list[float]) -> list[float]:
    """Logarithms after a step of Gauss and Newton, whose equations are solved by Gauss and Seidel."""
    terms = range(len(logs))

    def product(left: list[float], right: list[float]) -> float:
        return sum(weight * a * b for weight, a, b in zip(weights, left, right, strict=True))

    matrix = [[product(slopes[a], slopes[b]) + _PENALTY * (a == b) for b in terms] for a in terms]
    wanted = [-product(slopes[a], errors) - _PENALTY * logs[a] for a in terms]
    step = [0.0 for _ in terms]
    for _ in range(_SWEEPS):
        for a in terms:
            others = sum(matrix[a][b] * step[b] for b in terms if b != a)
            step[a] = (wanted[a] - others) / matrix[a][a]
    return [max(-_LARGEST, min(_LARGEST, value + change)) for value, change in zip(logs, step, strict=True)]


def _fragments(runs: Sequence[MeasuredRun], device: Device) -> float | None:
    """Share of activations and logits that is needed beside all else; None: no run has its memory."""
    found = []
    for run in runs:
        if run.bytes is None:
            continue
        ranks = memory_of_ranks(run.config, run.vocabulary, run.nodes * run.per_node, device.overhead)
        worst = max(ranks, key=lambda rank: rank.total)
        held = worst.tensors - worst.states
        if held:
            found.append((run.bytes - (worst.total - worst.bytes_of["allocator"])) / held)
    return min(_MOST_FRAGMENTS, max(0.0, median(found))) if found else None

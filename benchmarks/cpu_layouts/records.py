"""Measured layouts beside their predictions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.cpu_layouts.layouts import LAYOUTS, PROCESSES, Layout
from trainer.config.records.measured_hardware import HardwareDocument
from trainer.planning.estimate.devices import DEVICES, Device
from trainer.planning.estimate.measured_device import measured_device
from trainer.planning.estimate.memory import RankMemory
from trainer.planning.estimate.plan import RunPlan

CPU = DEVICES["CPU"]


@dataclass(frozen=True)
class Records:
    """The measurements.

    Attributes:
        machine: its processor and number of cores.
        speeds: by ranks, documents of the speed tests.
        runs: by ranks, model and layout, the runs of all rounds.
    """

    machine: Mapping[str, Any]
    speeds: Mapping[int, Sequence[HardwareDocument]]
    runs: Mapping[tuple[int, str, str], Sequence[Mapping[str, Any]]]

    def of(self, layout: Layout) -> Sequence[Mapping[str, Any]]:
        """Runs of a layout."""
        return self.runs.get((layout.ranks, layout.model, layout.name), ())

    def process(self, ranks: int) -> int:
        """Peak bytes of a process that trains next to nothing."""
        layout = next(one for one in PROCESSES if one.ranks == ranks)
        return max(int(max(run["peaks"])) for run in self.of(layout))

    def device(self, ranks: int) -> Device:
        """The CPU with the highest speed of each measurement, with a core for each rank.

        Other work, and ranks that share a core, only make them slower.
        """
        documents = self.speeds[max(one for one in self.speeds if one <= min(ranks, self.machine["cores"]))]
        best = [
            max(same, key=lambda one: one["rate"])
            for same in zip(*(each["measurements"] for each in documents), strict=True)
        ]
        return measured_device(CPU, {**documents[0], "measurements": best})


def read_records(path: Path) -> Records:
    """Records of a file."""
    machine: dict[str, Any] = {}
    speeds: dict[int, list[HardwareDocument]] = {}
    runs: dict[tuple[int, str, str], list[Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == "machine":
            machine = record
        elif record["kind"] == "speed":
            speeds.setdefault(record["ranks"], []).append(record["hardware"])
        else:
            runs.setdefault((record["ranks"], record["model"], record["layout"]), []).append(record)
    return Records(machine, speeds, runs)


@dataclass(frozen=True)
class JudgedLayout:
    """A layout, measured and predicted.

    Attributes:
        layout: the layout.
        peaks: measured bytes of each pipeline rank's fullest rank, and the prediction.
        process: measured bytes of a process that trains next to nothing.
        measured_s: median over the steps of all rounds.
        predicted_s: predicted step.
        measured_cpu_s: CPU seconds of a step on a rank of the busiest pipeline rank, median over the rounds.
        predicted_cpu_s: predicted step without its waiting for other stages, on the busiest pipeline rank.
    """

    layout: Layout
    peaks: Sequence[tuple[int, RankMemory]]
    process: int
    measured_s: float
    predicted_s: float
    measured_cpu_s: float
    predicted_cpu_s: float

    @property
    def memory_error(self) -> float:
        """Of the fullest rank: predicted by measured, less 1."""
        measured = max(peak for peak, _ in self.peaks)
        return max(predicted.total for _, predicted in self.peaks) / measured - 1

    @property
    def tensor_error(self) -> float:
        """The same without the process: of its measured peak, and of its predicted runtime and communicators."""
        measured, predicted = max(self.peaks, key=lambda pair: pair[0])
        beside = predicted.bytes_of["runtime"] + predicted.bytes_of["communication"]
        return (predicted.total - beside) / (measured - self.process) - 1

    @property
    def time_error(self) -> float:
        """Predicted by measured, less 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def cpu_error(self) -> float:
        """Of CPU seconds: predicted by measured, less 1."""
        return self.predicted_cpu_s / self.measured_cpu_s - 1


def judged(records: Records) -> list[JudgedLayout]:
    """All layouts that were measured."""
    return [_judge(layout, records) for layout in LAYOUTS if records.of(layout)]


def _judge(layout: Layout, records: Records) -> JudgedLayout:
    runs = records.of(layout)
    plan = layout.plan(records.device(layout.ranks))
    measured = [0] * len(plan.ranks)
    for run in runs:
        for rank, peak in enumerate(run["peaks"]):
            own = layout.pipeline_rank(rank)
            measured[own] = max(measured[own], peak)
    seconds = [one for run in runs for one in run["seconds"]]
    return JudgedLayout(
        layout,
        tuple(zip(measured, plan.ranks, strict=True)),
        records.process(layout.ranks),
        median(seconds),
        plan.step.total,
        median(_busiest(layout, run["cpu"]) for run in runs),
        _busy_seconds(plan),
    )


def _busiest(layout: Layout, seconds: Sequence[float]) -> float:
    """CPU seconds of the busiest pipeline rank, in the mean of its ranks."""
    own: dict[int, list[float]] = {}
    for rank, each in enumerate(seconds):
        own.setdefault(layout.pipeline_rank(rank), []).append(each)
    return max(map(mean, own.values()))


def _busy_seconds(plan: RunPlan) -> float:
    """Seconds of the busiest pipeline rank's actions and update, and of messages that nothing hides."""
    busy = max(sum(end - start for start, end in row) for row in plan.step.times.rows)
    return busy + plan.step.exposed + plan.step.optimizer

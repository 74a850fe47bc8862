"""Measurements of single ranks, and the document made of those of all. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from trainer.config.records.measured_hardware import Group, Measurement, What


@dataclass(frozen=True)
class Sample:
    """A measurement of one rank: the fields of Measurement, without those that take several ranks."""

    what: What
    dtype: str
    work: float
    seconds: float
    repetitions: int
    shape: tuple[int, ...] = ()
    bytes: int | None = None
    group: Group = "device"
    ranks: int = 1


@dataclass(frozen=True)
class RankReport:
    """All that one rank has measured.

    Attributes:
        host: name of its node.
        is_first: True for the first rank of a node.
        device: name of the device.
        memory: bytes of its memory; None without a GPU.
        samples: in the order of the measurements.
    """

    host: str
    is_first: bool
    device: str
    memory: int | None
    samples: tuple[Sample, ...]


def combine(reports: Sequence[RankReport]) -> list[Measurement]:
    """The measurements of all ranks, in the order in which they were made; the reports are in order of rank."""
    found: dict[object, list[tuple[float, str, Sample]]] = {}
    for report in reports:
        for sample in report.samples:
            key = (sample.what, sample.group, sample.shape, sample.bytes)
            found.setdefault(key, []).append((sample.seconds, report.host, sample))
    return [_measurement(samples) for samples in found.values()]


def _measurement(samples: Sequence[tuple[float, str, Sample]]) -> Measurement:
    seconds = median(sample[0] for sample in samples)
    # Ranks of one group have the same time; the first of them stands for the group.
    slowest = max(samples, key=lambda sample: sample[0])
    first = samples[0][2]
    return {
        "what": first.what,
        "dtype": first.dtype,
        "shape": [*first.shape],
        "bytes": first.bytes,
        "group": first.group,
        "ranks": first.ranks,
        "work": first.work,
        "seconds": seconds,
        "rate": first.work / seconds,
        "slowest_seconds": slowest[0],
        "slowest_host": slowest[1],
        "repetitions": first.repetitions,
    }


def device_of(reports: Sequence[RankReport]) -> str:
    """Name of the device; of several kinds all names, as the slowest sets the speed of a run."""
    return ", ".join(sorted({report.device for report in reports}))

"""Runs of a demonstration: no cluster, no files, always the same.

The runs go through the same reading and deciding as real ones; only the machine and its queue are made up.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from llmctl.backends.base import JobReport, SubmittedJob
from llmctl.job_state import JobState
from llmctl.runs.job_status import SchedulerWatch
from llmctl.runs.observe import observe_runs
from llmctl.runs.record import RunRecord, Submission
from llmctl.runs.state import JobAnswer
from llmctl.transport.protocol import Transport
from llmctl.watch.demo_machine import Clock, DemoMachine, DemoQueue
from llmctl.watch.demo_training import Attempt, Training
from llmctl.watch.opened_run import RunReader
from llmctl.watch.source import ClusterLook, Listing

BEGIN = 1_764_234_000.0
"""Time of the demonstration's begin, in seconds since 1970."""
_STARTS_S = 40.0
"""Seconds until the job that waits is started."""


@dataclass(frozen=True)
class _DemoRun:
    run_id: str
    cluster: str
    submitted: float
    training: Training
    job: Callable[[float], JobAnswer]

    @property
    def record(self) -> RunRecord:
        return RunRecord(
            run_id=self.run_id,
            name=self.run_id.rpartition("-")[0],
            created=self.submitted,
            llmctl_version="",
            cluster=self.cluster,
            run_dir=Path(self.training.run_dir),
            command=(),
            job={"nodes": len(self.training.hosts), "gpus_per_node": self.training.gpus_per_node},
            config={"training": {"train_iters": self.training.train_iters}},
            origins={},
            code={},
            submissions=(Submission(1, self.submitted, (SubmittedJob("login", "1"),)),),
        )


class DemoRuns:
    """The source of the demonstration."""

    def __init__(self, clock: Clock | None = None) -> None:
        """Begin the demonstration.

        Args:
            clock: seconds since 1970, as shown. None: they begin at ``BEGIN`` now.
        """
        began = time.monotonic()
        clock = clock or (lambda: BEGIN + time.monotonic() - began)
        machine = DemoMachine(clock)
        self._runs = {run.run_id: run for run in _runs()}
        for run in self._runs.values():
            run.training.put_on(machine)
        self._transport = cast("Transport", machine)
        queue = DemoQueue(clock, {run.run_id: run.job for run in self._runs.values()})
        self._scheduler = cast("SchedulerWatch", queue)

    def list_runs(self, *, every: bool) -> Listing:
        """See RunSource."""
        del every
        return Listing({run.run_id: run.cluster for run in self._runs.values()})

    def look(self, cluster: str, run_ids: tuple[str, ...]) -> ClusterLook:
        """See RunSource."""
        records = [self._runs[run_id].record for run_id in run_ids if self._runs[run_id].cluster == cluster]
        return ClusterLook(tuple(observe_runs(records, self._transport, self._scheduler)))

    def open_run(self, run_id: str) -> RunReader:
        """See RunSource."""
        return RunReader(lambda: self._runs[run_id].record, self._transport, self._scheduler)


def _running(hosts: tuple[str, ...]) -> JobAnswer:
    report = JobReport("1", JobState.RUNNING, "RUNNING", hosts=hosts)
    return JobAnswer(JobState.RUNNING, "RUNNING", source="queue", report=report)


def _waits(until: float, hosts: tuple[str, ...]) -> Callable[[float], JobAnswer]:
    def job(now: float) -> JobAnswer:
        if now >= until:
            return _running(hosts)
        words = "waiting for nodes (Resources)"
        report = JobReport("1", JobState.PENDING, "PENDING", reason=words)
        return JobAnswer(JobState.PENDING, words, source="queue", report=report)

    return job


def _hosts(prefix: str, first: int, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}{number:03d}" for number in range(first, first + count))


def _run(run_id: str, cluster: str, training: Training, job: Callable[[float], JobAnswer] | None = None) -> _DemoRun:
    begins = training.attempts[0].begins
    submitted = BEGIN - 600 if job is not None else begins - 90
    return _DemoRun(run_id, cluster, submitted, training, job or (lambda _: _running(training.hosts)))


def _runs() -> list[_DemoRun]:
    """The runs, newest first."""
    waiting = _hosts("cn", 120, 2)
    return [
        _run(
            "moe-16x1b-4e2a",
            "alpha",
            Training(
                *("/demo/moe-16x1b-4e2a", waiting, 8, 2000, 0.25, 1_048_576, 0.36, 2.1, 61.2),
                (Attempt(BEGIN + _STARTS_S + 2, 1, 2000, builds=True),),
            ),
            _waits(BEGIN + _STARTS_S, waiting),
        ),
        _run(
            "llama-8b-91c0",
            "alpha",
            Training(
                *("/demo/llama-8b-91c0", _hosts("cn", 101, 4), 8, 4000, 0.5, 524_288, 0.43, 2.0, 68.4),
                (
                    Attempt(BEGIN - 2400, 1, 1180, "failed", guilty=21),
                    Attempt(BEGIN - 1105, 1001, 4000),
                ),
            ),
        ),
        _run(
            "qwen-14b-07bf",
            "beta",
            Training(
                *("/demo/qwen-14b-07bf", _hosts("g", 7, 2), 8, 3000, 0.8, 262_144, 0.39, 2.2, 74.9),
                (Attempt(BEGIN - 1500, 1, 1620, "hangs", guilty=13),),
            ),
        ),
        _run(
            "llama-8b-5d13",
            "beta",
            Training(
                *("/demo/llama-8b-5d13", _hosts("g", 3, 2), 8, 4000, 0.6, 262_144, 0.41, 2.3, 70.1),
                (Attempt(BEGIN - 2200, 1, 1375, "failed", guilty=11),),
            ),
        ),
        _run(
            "gpt-350m-c2a8",
            "beta",
            Training(
                *("/demo/gpt-350m-c2a8", _hosts("g", 1, 1), 8, 2000, 0.4, 131_072, 0.34, 2.9, 22.6),
                (Attempt(BEGIN - 3900, 1, 2000),),
            ),
        ),
    ]

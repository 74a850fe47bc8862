"""The protocol of a tracker: an object that takes a run's numbers, such as a dashboard's client. Torch-free.

``logging.trackers: [my_package.my_logger:make]`` names a function without arguments that returns a tracker:

    class MyLogger:
        def begin(self, facts): self.file = open(f"{facts.run_id}.txt", "a")
        def log(self, iteration, scalars): print(iteration, scalars, file=self.file)
        def end(self, outcome): self.file.close()

    def make(): return MyLogger()

All calls are made on rank 0, one after another, by a thread of the tracker's own. The run never waits for it, and an
exception ends neither the run nor the tracker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

SAMPLES = "samples vs steps"
"""Name of the scalar that every row has: the samples that the model has been trained on."""

Outcome = Literal["completed", "stopped", "failed"]


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run at the start of an attempt.

    Attributes:
        run_id: the same in all attempts of the run.
        name: the user's name for the run; ``run_id`` if there is none.
        attempt: number of the attempt, from 1.
        iteration: the attempt trains from here on; iterations that an earlier attempt logged beyond are done again.
        config: the training config as plain values; holds no secret.
        layout: size of each axis of the parallel layout, and ``world_size``.
        origin: cluster, version of llmctl, commit of the user's project, nodes and the price of one, where known.
        folder: run directory; None without.
    """

    run_id: str
    name: str
    attempt: int = 1
    iteration: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, int] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None


class Tracker(Protocol):
    """Takes the numbers of one attempt."""

    def begin(self, facts: RunFacts) -> int | None:
        """Open the tracker's run, or go on with it if ``facts.run_id`` is known.

        Returns:
            The last iteration that the tracker has. The rows of metrics.jsonl from there to ``facts.iteration`` come
            first. None: earlier rows are not wanted.
        """

    def log(self, iteration: int, scalars: Mapping[str, float]) -> None:
        """Take the finite numbers of one row of metrics.jsonl, by the names of trainer.trackers.scalars.

        Iterations never decrease. Training, validation and tasks have a row each, which may have the same iteration.
        """

    def end(self, outcome: Outcome) -> None:
        """Finish: after this call the process may end at any time."""

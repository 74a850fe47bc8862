"""Time and samples of the iterations since the last logged one, in this attempt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Interval:
    """Sums over the iterations of an interval.

    Attributes:
        iterations: number of them.
        time_s: their time.
        samples: samples of their batches.
        last_samples: samples of the newest batch, which the next interval keeps.
    """

    iterations: int = 0
    time_s: float = 0.0
    samples: int = 0
    last_samples: int = 0

    def add(self, time_s: float, samples: int) -> None:
        """Add an iteration."""
        self.iterations += 1
        self.time_s += time_s
        self.samples += samples
        self.last_samples = samples

    def begin(self) -> None:
        """Begin the next interval."""
        self.iterations, self.time_s, self.samples = 0, 0.0, 0

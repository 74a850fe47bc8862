"""Global batch sizes of a run as a function of the consumed samples: constant, or growing. Torch-free."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

MAX_INCREMENTS = 100_000
"""Of a growing batch. A run has a list of all its sizes."""


def can_grow(ramp: Sequence[int], full: int) -> bool:
    """True if ``ramp`` leads to batches of ``full`` samples."""
    if len(ramp) != 3 or min(ramp) < 1 or ramp[0] >= full:
        return False
    increments, rest = divmod(full - ramp[0], ramp[1])
    return not rest and increments <= MAX_INCREMENTS


@dataclass(frozen=True)
class Phase:
    """Iterations in a row that have one batch size.

    Attributes:
        iteration: iterations before the first of them.
        consumed_samples: samples before the first of them.
        samples: size of each batch.
    """

    iteration: int
    consumed_samples: int
    samples: int


@dataclass(frozen=True)
class BatchSizes:
    """The batch sizes of a run.

    With a ramp the sizes are those of Megatron-LM's --rampup-batch-size (release 0.15,
    megatron/core/num_microbatches_calculator.py, RampupBatchsizeNumMicroBatchesCalculator).

    Attributes:
        full: size of the full batch.
        ramp: size of the first batch, increment, and samples of the ramp, for which ``can_grow`` is True; empty: every
            batch is full.
    """

    full: int
    ramp: tuple[int, ...] = ()

    @property
    def increments(self) -> int:
        """Number of increments from the first size to the full one."""
        return (self.full - self.ramp[0]) // self.ramp[1] if self.ramp else 0

    def at(self, consumed_samples: int) -> int:
        """Size of the batch that follows ``consumed_samples`` samples."""
        if not self.ramp or consumed_samples > self.ramp[2]:
            return self.full
        start, increment, samples = self.ramp
        # Two divisions of floats, as there: another rounding may move an increment by one iteration.
        return start + int(consumed_samples / (samples / self.increments)) * increment

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The sizes that batches have, in order. A short ramp skips some sizes."""
        found = [Phase(0, 0, self.at(0))]
        while found[-1].samples != self.full:
            found.append(self._following(found[-1]))
        return tuple(found)

    def _following(self, phase: Phase) -> Phase:
        def is_over(batches: int) -> bool:
            return self.at(phase.consumed_samples + batches * phase.samples) != phase.samples

        # After one batch more than fits into the ramp, the batch is full.
        most = (self.ramp[2] - phase.consumed_samples) // phase.samples + 1
        batches = bisect_left(range(most), True, lo=1, key=is_over)
        consumed = phase.consumed_samples + batches * phase.samples
        return Phase(phase.iteration + batches, consumed, self.at(consumed))

    def samples_after(self, iterations: int) -> int:
        """Samples that the first ``iterations`` batches have."""
        phase = self.phases[bisect_right(self.phases, iterations, key=lambda one: one.iteration) - 1]
        return phase.consumed_samples + (iterations - phase.iteration) * phase.samples

    def iterations_reaching(self, samples: int) -> int:
        """Smallest number of batches that have ``samples`` samples or more."""
        return bisect_left(range(samples // min(self.full, self.at(0)) + 2), samples, key=self.samples_after)

    def iterations_of(self, samples: int) -> int:
        """Iterations of a run of ``samples`` samples by Megatron-LM's rule (update_train_iters, training.py).

        A partial last batch is left out, but only behind the ramp.
        """
        if not self.ramp:
            return samples // self.full
        # There the ramp goes on while its samples, or those of the run, are not exceeded.
        of_ramp = self.iterations_reaching(min(self.ramp[2], samples) + 1)
        return of_ramp + max(0, samples - self.samples_after(of_ramp)) // self.full

    def full_batches(self, samples: int) -> float:
        """``samples`` in full batches, by which schedules of learning rate and weight decay count."""
        whole, rest = divmod(samples, self.full)
        return samples / self.full if rest else whole

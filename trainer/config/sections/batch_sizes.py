"""Global batch sizes of a run as a function of the consumed samples: constant, growing, or in steps. Torch-free."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from trainer.config.sections.section import MAX_INT

MAX_INCREMENTS = 100_000
"""Of a growing batch. A run has a list of all its sizes."""

MAX_MICRO_BATCHES = 100_000
"""Per replica and iteration. The table of a pipeline schedule has an entry for each micro-batch."""
_THOUSANDS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def steps_of(schedule: str, seq_length: int) -> tuple[tuple[int, int], ...]:
    """First sample and batch size of each step of Megatron-LM's --step-batch-size-schedule, in order.

    As there (Megatron-LM main, megatron/core/num_microbatches_calculator.py, StepBatchsizeNumMicroBatchesCalculator)
    the numbers before the colons are tokens, which are divided by ``seq_length`` and rounded down.

    Raises:
        ValueError: one sentence, without the name of the key.
    """
    steps = sorted(_step(entry, seq_length) for entry in schedule.replace(",", " ").split())
    if not steps or steps[0][0]:
        raise ValueError(f"{schedule!r} has no step that begins at 0 tokens; begin it with 0:SIZE, such as 0:768")
    for (first, _), (second, _) in pairwise(steps):
        if first == second:
            raise ValueError(
                f"two steps of {schedule!r} begin at sample {first:,}, at {seq_length:,} tokens a sample; give each "
                "another beginning"
            )
    return tuple(steps)


def _step(entry: str, seq_length: int) -> tuple[int, int]:
    tokens, _, size = entry.partition(":")
    try:
        step = _number(tokens) // seq_length, _number(size)
    except (ArithmeticError, ValueError):
        step = (-1, 0)
    if not (0 <= step[0] <= MAX_INT and 1 <= step[1] <= MAX_INT):
        raise ValueError(
            f"{entry!r} is not a valid step; write TOKENS:SIZE, such as 250B:1536, with tokens from 0 and a size from "
            "1, with or without K, M, B or T"
        )
    return step


def _number(text: str) -> int:
    # Through a float, as there: 0.5M is valid.
    factor = _THOUSANDS.get(text[-1:].upper())
    return int(float(text[:-1]) * factor) if factor else int(float(text))


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
        steps: first sample and size of each step, see ``steps_of``, instead of a ramp; the last size is ``full``.
    """

    full: int
    ramp: tuple[int, ...] = ()
    steps: tuple[tuple[int, int], ...] = ()

    @property
    def are_constant(self) -> bool:
        """True if every batch is full because neither a ramp nor steps are given."""
        return not (self.ramp or self.steps)

    @property
    def span(self) -> str:
        """The ramp or the steps in words; empty without."""
        if self.steps:
            count, (last, _) = len(self.steps), self.steps[-1]
            return f"{count} step{'s' * (count > 1)}, the last from sample {last:,} on"
        return f"by {self.ramp[1]:,}, within {self.ramp[2]:,} samples" if self.ramp else ""

    @cached_property
    def largest(self) -> int:
        """Size of the largest batch."""
        return max((size for _, size in self.steps), default=self.full)

    @property
    def increments(self) -> int:
        """Number of increments from the first size to the full one."""
        return (self.full - self.ramp[0]) // self.ramp[1] if self.ramp else 0

    def at(self, consumed_samples: int) -> int:
        """Size of the batch that follows ``consumed_samples`` samples."""
        if self.steps:
            return self.steps[bisect_right(self.steps, consumed_samples, key=lambda step: step[0]) - 1][1]
        if not self.ramp or consumed_samples > self.ramp[2]:
            return self.full
        start, increment, samples = self.ramp
        # Two divisions of floats, as there: another rounding may move an increment by one iteration.
        return start + int(consumed_samples / (samples / self.increments)) * increment

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The sizes that batches have, in order. A short ramp or step skips some sizes."""
        found = [Phase(0, 0, self.at(0))]
        for first, _ in self.steps[1:]:
            batches = -(-(first - found[-1].consumed_samples) // found[-1].samples)
            if batches > 0:
                consumed = found[-1].consumed_samples + batches * found[-1].samples
                found.append(Phase(found[-1].iteration + batches, consumed, self.at(consumed)))
        while self.ramp and found[-1].samples != self.full:
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
        smallest = min(phase.samples for phase in self.phases)
        return bisect_left(range(samples // smallest + 2), samples, key=self.samples_after)

    def iterations_of(self, samples: int) -> int:
        """Iterations of a run of ``samples`` samples by Megatron-LM's rule (update_train_iters, training.py).

        A partial last batch is left out, but only behind the ramp; with steps the last batch reaches the samples.
        """
        if self.steps:
            return self.iterations_reaching(samples)
        if not self.ramp:
            return samples // self.full
        # There the ramp goes on while its samples, or those of the run, are not exceeded.
        of_ramp = self.iterations_reaching(min(self.ramp[2], samples) + 1)
        return of_ramp + max(0, samples - self.samples_after(of_ramp)) // self.full

    def full_batches(self, samples: int) -> float:
        """``samples`` in full batches, by which schedules of learning rate and weight decay count."""
        whole, rest = divmod(samples, self.full)
        return samples / self.full if rest else whole

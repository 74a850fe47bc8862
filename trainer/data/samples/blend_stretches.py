"""Parts of a blend's order (trainer.data.samples.blend), worked out in many stretches at once. Torch-free.

The order is one step after another, but what state it is in is soon forgotten: started a little off, it comes back to
the same counts. So many stretches of it are followed at once, each from a guess of the counts a few samples before its
start, and those that start otherwise than the stretch before ends are done again, until none does. What comes out is
exact; how good the guesses are decides on the time alone.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trainer.data.samples.windows import Numbers

MOST_COUNTS = 1 << 16
"""Counts held while stretches are worked out, 8 bytes each: of so many datasets times stretches, which stay in a cache
of the core."""
WARM_UP = 32
"""Samples before a stretch that its guess is for: of 10 datasets all guesses have come right after 5, of 100 after 64,
and 99 in 100 of them after 30."""

Counts = npt.NDArray[np.int64]


class Step(Protocol):
    """Follows stretches side by side."""

    def __call__(
        self,
        weights: npt.NDArray[np.float64],
        firsts: npt.NDArray[np.int64],
        counts: npt.NDArray[np.float64],
        steps: int,
        datasets: npt.NDArray[np.integer] | None = None,
        samples: Numbers | None = None,
        /,
    ) -> None:
        """Follow stretches from ``firsts`` for some ``steps``; changes their ``counts`` [stretch, dataset].

        What is chosen goes to ``datasets`` and ``samples`` [step, stretch], unless they are empty.
        """


class Stepper(NamedTuple):
    """What follows stretches."""

    step: Step
    at_once: int
    """How many are worth a guess each."""


class Followed(NamedTuple):
    """A part of the order."""

    datasets: npt.NDArray[np.integer]
    """Of each sample, [step, stretch]: those of a stretch are one after another."""
    samples: Numbers
    """Which of its dataset's samples each is, [step, stretch]."""
    after: Counts
    """What each dataset has served in the end."""


def follow(
    stepper: Stepper,
    weights: npt.NDArray[np.float64],
    counts: Counts,
    first: int,
    length: int,
    with_places: bool = True,
) -> Followed:
    """The order from sample ``first`` on.

    Args:
        stepper: what follows stretches of it; which one it is decides on the time alone.
        weights: of each dataset, float64, positive; they add up to 1.
        counts: what each dataset has served before.
        first: sample to begin with.
        length: number of samples, a power of two.
        with_places: without, the datasets and samples that are found are empty.
    """
    stretches = min(stepper.at_once, 1 << (length.bit_length() // 2 + 1))
    while stretches > 1 and (stretches * len(weights) > MOST_COUNTS or stretches > length):
        stretches //= 2
    steps = length // stretches
    kept = steps if with_places else 0
    datasets = np.empty((kept, stretches), np.int16 if len(weights) < 1 << 15 else np.int32)
    samples = np.empty((kept, stretches), np.int64)
    firsts = first + np.arange(stretches) * steps
    before = min(WARM_UP, steps // 2)
    states = _guess(weights, firsts - before, steps).astype(np.float64)
    # The first needs no guess, and has nothing before it.
    stepper.step(weights, firsts[1:] - before, states[1:], before)
    states[0] = counts
    starts = states.copy()
    stepper.step(weights, firsts, states, steps, datasets, samples)
    while len(wrong := np.flatnonzero((starts[1:] != states[:-1]).any(axis=1)) + 1):
        again = starts[wrong] = states[wrong - 1]
        own, own_samples = (np.empty((kept, len(wrong)), part.dtype) for part in (datasets, samples))
        stepper.step(weights, firsts[wrong], again, steps, own, own_samples)
        states[wrong], datasets[:, wrong], samples[:, wrong] = again, own, own_samples
    return Followed(datasets, samples, states[-1].astype(np.int64))


def step_in_numpy(
    weights: npt.NDArray[np.float64],
    firsts: npt.NDArray[np.int64],
    counts: npt.NDArray[np.float64],
    steps: int,
    datasets: npt.NDArray[np.integer] | None = None,
    samples: Numbers | None = None,
) -> None:
    """See Step."""
    # Float64, in which Megatron-LM compares: counts are exact to 2^53.
    behind = np.empty_like(counts)
    every, rows = counts.reshape(-1), np.arange(len(counts)) * counts.shape[1]
    numbers = firsts.astype(np.float64)
    for step in range(steps):
        np.multiply(weights, np.maximum(numbers, 1.0)[:, None], out=behind)
        np.subtract(behind, counts, out=behind)
        chosen = behind.argmax(axis=1)
        places = rows + chosen
        drawn = every[places]
        if datasets is not None and samples is not None and len(datasets):
            datasets[step], samples[step] = chosen, drawn
        drawn += 1.0
        every[places] = drawn
        numbers += 1.0


IN_NUMPY = Stepper(step_in_numpy, MOST_COUNTS)


def _guess(weights: npt.NDArray[np.float64], numbers: npt.NDArray[np.int64], steps: int) -> Counts:
    """Likely counts before each of ``numbers``: shares rounded down, the rest to the largest remainders.

    Datasets that are drawn less than once in ``steps`` have none of the rest: a stretch that lacks their sample draws
    it at once, while one that has it too early goes wrong to its end.
    """
    due = weights * numbers[:, None].astype(np.float64)
    counts = np.floor(due).astype(np.int64)
    quick = np.flatnonzero(weights * steps >= 1)
    if not len(quick):
        quick = np.arange(len(weights))
    rest = numbers - counts.sum(axis=1)
    ranks = np.argsort(np.argsort((counts - due)[:, quick], axis=1), axis=1)
    counts[:, quick] += rest[:, None] // len(quick) + (ranks < rest[:, None] % len(quick))
    return counts

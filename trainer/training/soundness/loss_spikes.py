"""Spikes of the loss: steps whose loss lies far above those before it. Pure, and torch-free."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from trainer.training.soundness.errors import SoundnessError

_NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
_LEAST_DEVIATION = 0.01
"""Of the median: a loss that hardly varies makes no small rise a spike."""


class LossSpikeError(SoundnessError):
    """The loss of a step is a spike, and the config asks for an end there."""


class RollBackError(SoundnessError):
    """The loss of a step is a spike; the next attempt begins at the newest checkpoint and passes over its samples."""


@dataclass(frozen=True)
class Spike:
    """A spike, and what it was judged by.

    Attributes:
        iteration: of the step.
        loss: mean loss of the step.
        median: of the losses before it.
        limit: loss above which a step is a spike.
        count: number of those losses.
    """

    iteration: int
    loss: float
    median: float
    limit: float
    count: int

    def __str__(self) -> str:
        """One clause without a full stop."""
        return (
            f"the loss of iteration {self.iteration}, {self.loss:.4g}, is a spike: the {self.count} losses before it "
            f"have the median {self.median:.4g}, and {self.limit:.4g} is the limit (training.loss_spike_factor)"
        )


class LossSpikes:
    """Judge of losses by the median and the median absolute deviation of those before, which no spike moves.

    Nothing is judged before half of the window has losses. A spike enters the window too, so that a loss that stays
    high is the usual one after half a window.
    """

    def __init__(self, factor: float, window: int, recent: list[float]) -> None:
        """Judge by ``factor`` deviations above the last ``window`` losses; ``recent`` holds them, and is changed."""
        self._factor = factor
        self._window = window
        self._recent = recent

    def judge(self, iteration: int, loss: float) -> Spike | None:
        """The spike, if this loss is one. A loss that is not finite is none; other checks end such a run."""
        recent = self._recent
        if len(recent) < max(2, self._window // 2) or not math.isfinite(loss):
            return None
        median = statistics.median(recent)
        deviation = _NORMAL * statistics.median(abs(each - median) for each in recent)
        limit = median + self._factor * max(deviation, _LEAST_DEVIATION * abs(median))
        return Spike(iteration, loss, median, limit, len(recent)) if loss > limit else None

    def add(self, loss: float) -> None:
        """Add the loss of a step to the window, if it is finite."""
        if math.isfinite(loss):
            self._recent.append(loss)
            del self._recent[: -self._window]

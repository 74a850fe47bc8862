"""Progress of a training run: the state besides tensors that an exact resume needs. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass
class TrainingProgress:
    """Counters of one run, over all its attempts.

    Attributes:
        iteration: completed iterations, including skipped ones.
        consumed_samples: training samples used, which is the position in the data.
        consumed_tokens: training tokens used.
        skipped_iterations: fp16 steps skipped because the loss scale was too high.
        nan_iterations: fp32 and bf16 steps skipped because loss or gradient was not finite.
        interval_iterations: iterations since the last logged one.
        interval_loss: sum of the finite token losses of these iterations.
        interval_tokens: number of tokens in that sum.
        seed: seed of dropout. The data order follows training.seed of the config.
        data_state: source of the samples and, for streamed text, the position in the text; None if
            ``consumed_samples`` is sufficient.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    interval_iterations: int = 0
    interval_loss: float = 0.0
    interval_tokens: int = 0
    seed: int = 0
    data_state: dict[str, Any] | None = None

    @property
    def optimizer_steps(self) -> int:
        """Number of iterations that updated the weights."""
        return self.iteration - self.skipped_iterations - self.nan_iterations

    def begin_interval(self) -> None:
        """Reset the counters of the logging interval."""
        self.interval_iterations, self.interval_loss, self.interval_tokens = 0, 0.0, 0

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint; floats survive JSON exactly."""
        values = asdict(self)
        if self.data_state is None:
            del values["data_state"]
        return values

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the counters from a checkpoint.

        Raises:
            KeyError: a counter is missing.
        """
        for item in fields(self):
            is_optional = item.name == "data_state"
            setattr(self, item.name, state.get(item.name) if is_optional else state[item.name])

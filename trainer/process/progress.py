"""How far a training run has come: everything besides tensors that an exact resume needs. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass
class TrainingProgress:
    """Counters of one run, over all its attempts.

    Attributes:
        iteration: iterations done, skipped ones included.
        consumed_samples: training samples used; the position in the data.
        consumed_tokens: the same in tokens.
        skipped_iterations: fp16 steps left out because the loss scale was too high.
        nan_iterations: fp32 and bf16 steps left out because loss or gradient was not finite.
        interval_iterations: iterations since the last logged one.
        interval_loss: sum of their token losses, over the finite ones.
        interval_tokens: tokens behind that sum.
        seed: of dropout. The data order follows training.seed of the config.
        data_state: what the samples come from and, of text that is encoded as it is needed, where it goes on; None
            where ``consumed_samples`` tells all.
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
        """Iterations that changed the weights."""
        return self.iteration - self.skipped_iterations - self.nan_iterations

    def begin_interval(self) -> None:
        """Forget what belongs to the interval that was just logged."""
        self.interval_iterations, self.interval_loss, self.interval_tokens = 0, 0.0, 0

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint; floats survive JSON bit for bit."""
        values = asdict(self)
        if self.data_state is None:
            del values["data_state"]
        return values

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what a checkpoint holds.

        Raises:
            KeyError: a counter is missing.
        """
        for item in fields(self):
            is_optional = item.name == "data_state"
            setattr(self, item.name, state.get(item.name) if is_optional else state[item.name])

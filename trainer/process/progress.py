"""Progress of a run: the state besides tensors that an exact resume needs. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

Skip = Literal["wanted", "bad"]
"""No step is made of an iteration: wanted, for the loss scale or a spike, or bad, as its numbers are not finite."""
# Values that only some runs have, and what stands for an absent one.
_OPTIONAL: dict[str, Callable[[], Any]] = {
    "data_state": lambda: None,
    "further_losses": dict,
    "skipped_samples": int,
    "recent_losses": list,
}


@dataclass
class TrainingProgress:
    """Counters of one run, over all its attempts.

    Attributes:
        iteration: completed iterations, including skipped ones.
        consumed_samples: training samples used, which is the position in the data.
        consumed_tokens: training tokens used.
        skipped_iterations: fp16 steps skipped because the loss scale was too high; steps skipped because their loss was
            a spike; and iterations that were passed over.
        nan_iterations: fp32 and bf16 steps skipped because loss or gradient was not finite.
        skipped_samples: training samples of the skipped steps of all kinds.
        interval_iterations: iterations since the last logged one.
        interval_loss: sum of the finite token losses of these iterations.
        interval_tokens: number of tokens in that sum.
        further_losses: the same sum and number of each further loss, such as BERT's sop_loss, or mtp_1_loss.
        recent_losses: of the newest steps, by which a spike is judged, the oldest first.
        seed: seed of dropout. The data order follows training.seed of the config.
        data_state: source of the samples and, for streamed text, the position in the text; None if
            ``consumed_samples`` is sufficient.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    skipped_samples: int = 0
    interval_iterations: int = 0
    interval_loss: float = 0.0
    interval_tokens: int = 0
    further_losses: dict[str, list[float]] = field(default_factory=dict)
    recent_losses: list[float] = field(default_factory=list)
    seed: int = 0
    data_state: dict[str, Any] | None = None

    @property
    def optimizer_steps(self) -> int:
        """Number of iterations that updated the weights."""
        return self.iteration - self.skipped_iterations - self.nan_iterations

    def count(
        self,
        samples: int,
        tokens: int,
        losses: Mapping[str, tuple[float, int]],
        skip: Skip | None,
    ) -> None:
        """Count an iteration of so many samples and tokens.

        Args:
            samples: of the global batch.
            tokens: of the global batch.
            losses: sum and number of labels of each term of its loss.
            skip: the reason why no step was made; None if one was.
        """
        self.iteration += 1
        self.consumed_samples += samples
        self.consumed_tokens += tokens
        self.interval_iterations += 1
        is_number = all(math.isfinite(total) for total, _ in losses.values())
        if is_number:
            self.add_losses(losses)
        self.skipped_samples += samples if skip or not is_number else 0
        if skip == "wanted":
            self.skipped_iterations += 1
        elif skip or not is_number:
            self.nan_iterations += 1

    def add_losses(self, losses: Mapping[str, tuple[float, int]]) -> None:
        """Add the sum and the number of labels of each term of an iteration's loss; the first is that of tokens."""
        (first_sum, first_count), *_ = losses.values()
        self.interval_loss += first_sum
        self.interval_tokens += first_count
        for name, (total, count) in list(losses.items())[1:]:
            self.add_further_loss(name, total, count)

    def add_further_loss(self, name: str, loss: float, count: float) -> None:
        """Add the sum of a further loss in one iteration, and the number of its labels."""
        before = self.further_losses.get(name, [0.0, 0.0])
        self.further_losses[name] = [before[0] + loss, before[1] + count]

    def pass_over(self, samples: int, tokens: int) -> None:
        """Count an iteration that makes no step, with its samples and tokens."""
        self.iteration += 1
        self.consumed_samples += samples
        self.consumed_tokens += tokens
        self.skipped_samples += samples
        self.skipped_iterations += 1

    def begin_interval(self) -> None:
        """Reset the counters of the logging interval."""
        self.interval_iterations, self.interval_loss, self.interval_tokens = 0, 0.0, 0
        self.further_losses = {}

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint; floats survive JSON exactly."""
        values = asdict(self)
        for name in _OPTIONAL:
            if not values[name]:
                del values[name]
        return values

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the counters from a checkpoint.

        Raises:
            KeyError: a counter is missing.
        """
        for item in fields(self):
            absent = _OPTIONAL.get(item.name)
            setattr(self, item.name, state[item.name] if absent is None else state.get(item.name, absent()))

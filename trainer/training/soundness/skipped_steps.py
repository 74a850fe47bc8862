"""Steps whose losses or gradients were not finite, and the limits at which they end a run."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from trainer.training.soundness.errors import SoundnessError


class NonFiniteError(SoundnessError):
    """Losses or gradients of many steps were not finite: the weights are past recovery, or the data is."""

    def __init__(self, steps: str, iteration: int, root: Path | None, origin: str = "") -> None:
        """Describe the ``steps`` skipped up to ``iteration``, of a run that saves in ``root``, and their ``origin``."""
        saves = (
            f"each save of this attempt in {root} followed a finite step" if root is not None else "nothing was saved"
        )
        where = f" ({origin})" if origin else ""
        super().__init__(
            f"losses or gradients of {steps} up to iteration {iteration} were not finite{where}; {saves}. Lower "
            "optimizer.lr, set optimizer.clip_grad or check the data, then resume"
        )


class SkippedSteps:
    """The newest steps, each finite or not. Steps that search for a loss scale are not counted at all.

    Attributes:
        in_a_row: steps since the last finite one.
    """

    def __init__(self, most: int, window: int | None) -> None:
        """Limits: ``most`` in a row, and more than ``most`` of the last ``window``, unset twice ``most``.

        0 disables a limit; ``most`` 0 disables both.
        """
        self.in_a_row = 0
        self._most = most
        self._recent: deque[bool] = deque(maxlen=2 * most if window is None else window)

    def add(self, skipped: bool) -> None:
        """Count a step."""
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        self._recent.append(skipped)

    @property
    def all_of_them(self) -> str:
        """All the newest steps, in words, if none of them was finite; else empty."""
        return f"all the last {self.in_a_row} steps" if self.in_a_row and self.in_a_row >= len(self._recent) else ""

    @property
    def excess(self) -> str:
        """The steps that reach a limit, in words; empty within the limits."""
        if not self._most:
            return ""
        if self.in_a_row >= self._most:
            return f"the last {self.in_a_row} steps (training.max_skipped_steps {self._most})"
        if sum(self._recent) > self._most:
            window = self._recent.maxlen
            return (
                f"{sum(self._recent)} of the last {len(self._recent)} steps (training.max_skipped_steps {self._most}, "
                f"skipped_steps_window {window})"
            )
        return ""

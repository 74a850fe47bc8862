"""The loss scale, which prevents underflow of fp16 gradients. Torch-free.

Source: Micikevicius et al. 2018, section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config.sections.training import TrainingConfig

_GROWTH = 2.0
_BACKOFF = 0.5


@dataclass
class LossScaler:
    """Loss scale, adapted by Megatron-LM's rule (``DynamicGradScaler``) unless constant.

    Overflows use up ``hysteresis``; afterwards each overflow halves the scale. ``window`` steps in a row without
    an overflow double the scale and restore the hysteresis.

    Attributes:
        scale: factor of the loss before backward. 1 unless training is in fp16.
        window: None keeps the scale constant.
        good_steps: steps since the last overflow or change.
        hysteresis_left: overflows until the next one halves the scale, plus one.
    """

    scale: float = 1.0
    min_scale: float = 1.0
    window: int | None = None
    hysteresis: int = 2
    good_steps: int = 0
    hysteresis_left: int = 2

    @classmethod
    def build(cls, config: TrainingConfig) -> LossScaler:
        """The scaler of the config: scale 1 outside fp16, constant with loss_scale, else dynamic."""
        if not config.fp16:
            return cls()
        if config.loss_scale is not None:
            return cls(scale=config.loss_scale)
        return cls(
            scale=config.initial_loss_scale,
            min_scale=config.min_loss_scale,
            window=config.loss_scale_window,
            hysteresis=config.hysteresis,
            hysteresis_left=config.hysteresis,
        )

    def update(self, overflow: bool) -> None:
        """Record whether one step overflowed. All ranks must pass the same answer."""
        if self.window is None:
            return
        if overflow:
            self.good_steps = 0
            self.hysteresis_left -= 1
            if self.hysteresis_left <= 0:
                self.scale = max(self.scale * _BACKOFF, self.min_scale)
            return
        self.good_steps += 1
        # >= because a resumed run may have a window shorter than the good steps that it took over.
        if self.good_steps >= self.window:
            self.good_steps = 0
            self.hysteresis_left = self.hysteresis
            self.scale *= _GROWTH

    @property
    def can_fall(self) -> bool:
        """True if an overflow may still lower the scale, and so be the search for a scale that fits."""
        return self.window is not None and self.scale > self.min_scale

    def state(self) -> dict[str, float | int | None]:
        """The state as plain values, for a checkpoint."""
        return asdict(self)

    def load(self, state: Mapping[str, float | int | None]) -> None:
        """Take scale and counters from a checkpoint.

        The rules stay those of the present config.
        """
        if self.window is None or state.get("window") is None:
            return
        self.scale = float(state["scale"] or self.scale)
        self.good_steps = int(state["good_steps"] or 0)
        self.hysteresis_left = int(state["hysteresis_left"] or 0)

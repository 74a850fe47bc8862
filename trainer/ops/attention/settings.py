"""Settings by which one layer's attention computes its weights. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainer.config.sections.scales import score_scale

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig


@dataclass(frozen=True)
class AttentionSettings:
    """The scores, and the keys that a query sees.

    Attributes:
        scale: factor of the product of query and key.
        softcap: c: a scaled score s becomes c * tanh(s / c), before the mask (Gemma 2, arXiv:2408.00118, section 2).
        causal: a query sees no later keys. With fewer queries than keys the last query sees the last key.
        window: positions that a query sees, its own included; None: all of them. Only with ``causal``.
    """

    scale: float
    softcap: float | None = None
    causal: bool = True
    window: int | None = None

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: a window without the causal mask.
        """
        if self.window is not None and not self.causal:
            raise ValueError("a sliding window needs causal attention")

    @classmethod
    def of(cls, model: ModelConfig, layer: int) -> AttentionSettings:
        """Settings of self-attention in layer number ``layer`` of the model."""
        return cls(score_scale(model), model.attn_logit_softcapping, model.is_causal, model.window_of(layer))

    @property
    def is_plain(self) -> bool:
        """True for causal attention without window and softcap."""
        return self.causal and self.window is None and self.softcap is None

    def within(self, length: int) -> AttentionSettings:
        """The same attention over ``length`` keys: a window that covers them all is none."""
        if self.window is None or self.window < length:
            return self
        return replace(self, window=None)

"""What layers know of the micro-batch that passes through them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.data.document_places import Documents
    from trainer.layers.rotary import RotaryTable
    from trainer.random_streams import MicroBatchRandomness


@dataclass(frozen=True)
class ForwardPass:
    """One micro-batch on its way through the layers of a rank.

    Attributes:
        rotary: angles of this rank's positions; None without rotary embedding.
        documents: where documents begin and end, if attention must not cross from one to another.
        randomness: the streams of dropout; None drops nothing.
        aux_loss_scale: derivative of what is minimised with respect to an auxiliary loss of this micro-batch: a layer
            that adds one multiplies its gradient by this. 0 where there is no backward.
        limits_experts: whether experts that are full drop tokens, if the model says so; they do in training only.
    """

    rotary: RotaryTable | None = None
    documents: Documents | None = None
    randomness: MicroBatchRandomness | None = None
    aux_loss_scale: float = 0.0
    limits_experts: bool = True

"""Stage: the part of a model on one pipeline stage, as the pipeline sees it.

Legend: S this rank's part of the sequence, B micro-batch, H hidden; ``/t`` = divided over tp.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer.distributed.random_streams import MicroBatchRandomness
from trainer.model.context import ParallelAxes

if TYPE_CHECKING:
    from trainer.data.samples.micro_batch import MicroBatch
    from trainer.model.cache import KeyValueCache


class Stage(nn.Module):
    """One virtual stage: contiguous layers, possibly none.

    A model is a subclass: it takes the tensors that it needs from the micro-batch, and its last stage computes the sum
    of each term of the loss. MicroBatch.loss_counts has their divisors.
    """

    def __init__(self, dtype: torch.dtype, hidden_size: int, axes: ParallelAxes):
        """Build a stage without layers.

        Args:
            dtype: of the activations sent between stages.
            hidden_size: their last dim.
            axes: the axes along which layers are divided.
        """
        super().__init__()
        self.dtype = dtype
        self._hidden_size = hidden_size
        self._axes = axes

    def hidden_shape(self, tokens: torch.Tensor) -> tuple[int, int, int]:
        """Shape [S(/t), B, H] of the activations sent between stages, for tokens [B, S]."""
        size, length = tokens.shape
        tp = self._axes.tp
        return (length // tp.size if tp.sequence_parallel else length, size, self._hidden_size)

    @abstractmethod
    def forward(
        self,
        hidden: torch.Tensor | None,
        micro_batch: MicroBatch,
        randomness: MicroBatchRandomness | None,
        compute_loss: bool = True,
        aux_loss_scale: float = 0.0,
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor:
        """Run the stage on one micro-batch.

        Collective: all tp, cp and ep ranks, and all dp x cp ranks if they shard the stage's weights.

        Args:
            hidden: the previous stage's result; None on the first stage.
            micro_batch: tokens, labels and masks of this rank's part of the sequences, on this stage's device.
            randomness: the random streams of dropout; None outside of training, which also disables token dropping by
                full experts.
            compute_loss: False returns logits on the last stage.
            aux_loss_scale: see ForwardPass.
            cache: of decoders only: the tokens before those of ``micro_batch``. The last stage then returns the logits
                of each row's last token only. It needs a layout without sequence and context parallelism.

        Returns:
            [S(/t), B, H], or on the last stage the float32 sum of the losses of the valid tokens, the same on all tp
            ranks; of a model with several terms of the loss their sums [terms], in the order of
            MicroBatch.loss_counts. Without ``compute_loss`` this rank's logits [S, B, columns], without the columns
            of vocabulary padding: the last ranks may have fewer columns than the others, or none.
        """

"""Micro-batches of T5 samples.

Legend: B micro-batch, E encoder and D decoder tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from trainer.data.masked.t5_dataset import T5Sample
from trainer.data.samples.micro_batch import MicroBatch


def join_t5(samples: Sequence[T5Sample], index: int) -> MicroBatch:
    """Micro-batch number ``index`` of the global batch: tokens [B, D], encoder_tokens [B, E].

    The decoder's padding needs no mask: it is at the end, where causal attention hides it, and does not count in the
    loss.
    """

    def stacked(part: Callable[[T5Sample], npt.NDArray[np.generic]]) -> torch.Tensor:
        return torch.from_numpy(np.stack([part(sample) for sample in samples]))

    counts = stacked(lambda sample: sample.loss_mask)
    return MicroBatch(
        tokens=stacked(lambda sample: sample.decoder_tokens),
        # A label without a loss must still be a token.
        labels=stacked(lambda sample: sample.labels).where(counts, 0),
        loss_mask=counts,
        index=index,
        encoder_tokens=stacked(lambda sample: sample.encoder_tokens),
        encoder_mask=stacked(lambda sample: sample.encoder_mask),
    )

"""Micro-batches of BERT samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trainer.data.masked.bert_dataset import BertSample
from trainer.data.samples.micro_batch import MicroBatch


def join_bert(samples: Sequence[BertSample], index: int, *, has_order: bool) -> MicroBatch:
    """Build the micro-batch with number ``index`` of the global batch.

    With ``has_order`` each sample has a label: 1 if part B precedes part A in the text, else 0.
    """
    tokens, labels, types, counts, padding = (
        torch.from_numpy(np.stack([getattr(sample, name) for sample in samples]))
        for name in ("tokens", "labels", "types", "loss_mask", "padding_mask")
    )
    # Tokens without a label have -1, which is not a column of the logits; the loss mask leaves them out.
    return MicroBatch(
        tokens=tokens,
        labels=labels.clamp_(min=0),
        loss_mask=counts,
        index=index,
        padding_mask=padding,
        token_types=types,
        sample_labels=torch.tensor([int(sample.is_random) for sample in samples]) if has_order else None,
    )

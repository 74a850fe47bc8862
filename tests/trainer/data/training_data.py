"""Configs and micro-batches of small training runs for tests."""

from __future__ import annotations

from typing import Any

import torch

from trainer.config.train_config import TrainConfig
from trainer.data.samples.batches import TrainData
from trainer.data.samples.micro_batch import MicroBatch
from trainer.planning.build_config import build_config


def config(data: dict[str, Any], *, model: dict[str, Any] | None = None, **training: Any) -> TrainConfig:
    return build_config(
        {
            "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, **(model or {})},
            "training": {"train_iters": 10, "seq_length": 8, "micro_batch_size": 2, "global_batch_size": 8, **training},
            "optimizer": {"lr": 1e-3},
            "data": data,
        }
    )


def by_number(data: list[TrainData], consumed: int = 0) -> dict[int, MicroBatch]:
    return {batch.index: batch for part in data for batch in part.micro_batches("train", consumed)}


def same(one: MicroBatch, other: MicroBatch) -> bool:
    masks = (
        one.loss_mask is other.loss_mask
        if one.loss_mask is None or other.loss_mask is None
        else torch.equal(one.loss_mask, other.loss_mask)
    )
    return torch.equal(one.tokens, other.tokens) and torch.equal(one.labels, other.labels) and masks

"""Which layers each virtual stage of a pipeline holds. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config import TrainConfig


def partition_layers(config: TrainConfig, vocab_size: int) -> tuple[range, ...]:
    """Numbers of the layers of every virtual stage, in order; together all layers of the model.

    Args:
        config: the training config.
        vocab_size: rows of the vocabulary, which weigh on the stages with embedding and LM head.
    """
    count, layers = config.placement.num_virtual_stages, config.model.num_layers
    del vocab_size
    bounds = [layers * stage // count for stage in range(count + 1)]
    return tuple(range(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False))

"""What a loss over a vocabulary is made of: which columns of it a rank has, and what is added to the cross entropy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VocabColumns:
    """Which columns of the vocabulary a rank's logits are.

    Attributes:
        first: number of the first in the vocabulary.
        num_valid: how many are vocabulary rather than padding, which follows them; may be 0.
        vocab_size: columns of the vocabulary over all ranks, without padding.
    """

    first: int
    num_valid: int
    vocab_size: int

    @property
    def is_whole(self) -> bool:
        """Whether no other rank has any."""
        return self.num_valid == self.vocab_size


@dataclass(frozen=True)
class LossTerms:
    """What is added to the plain cross entropy.

    Training adds nothing: Megatron-LM, whose flags name the keys of the config, has none for these. They are for losses
    that call ``vocab_parallel_cross_entropy`` by themselves.

    Attributes:
        z_loss: weight of the squared logarithm of the normaliser.
        label_smoothing: share of the label that is spread evenly over the vocabulary.
        ignore_index: a label of tokens without a loss: theirs is 0, and so is its gradient.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    ignore_index: int = -100

"""Vocabulary columns of a rank, and loss terms besides the cross entropy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VocabColumns:
    """Vocabulary columns of a rank's logits.

    Attributes:
        first: vocabulary id of the first column.
        num_valid: number of vocabulary columns, may be 0. Padding columns follow them.
        vocab_size: columns of the vocabulary over all ranks, without padding.
    """

    first: int
    num_valid: int
    vocab_size: int

    @property
    def is_whole(self) -> bool:
        """True if this rank has the whole vocabulary."""
        return self.num_valid == self.vocab_size


@dataclass(frozen=True)
class LossTerms:
    """Loss terms besides the plain cross entropy.

    Training sets ``z_loss`` and ``softcap``. Custom losses that call ``vocab_parallel_cross_entropy``
    may set the others.

    Attributes:
        z_loss: weight of the squared logarithm of the normaliser.
        label_smoothing: share of the label's probability that is spread evenly over the vocabulary.
        ignore_index: label of tokens without a loss; loss and gradient of these tokens are 0.
        softcap: c replaces each logit by c * tanh(logit / c) before everything else (Gemma 2, arXiv:2408.00118, section
            2); None leaves logits as they are.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    ignore_index: int = -100
    softcap: float | None = None

"""Dropout of attention weights, drawn again for any block of the score matrix instead of being kept.

Legend: B samples, A heads, Q queries, K keys.
The mask of a score is a hash of its row's keys, which name the seed, the head, the sample and the query, and of its
column's key. The hash multiplies and shifts as the finalizer of MurmurHash3 does, with a row key as the first factor.
So each layout and each division into blocks has the same masks, and their memory is linear in Q and K.
Srivastava et al. 2014, "Dropout", with the inverse scaling at training time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from trainer.ops.attention.tiles import Tile

_SHIFT = 15
_UNSIGNED = (1 << (32 - _SHIFT)) - 1
_FACTOR = 0x2C1B3C6D
_SMALLEST = -(2**31)


@dataclass(frozen=True)
class KeptWeights:
    """Attention weights that dropout keeps.

    Attributes:
        rows: [2, B, A, Q], int32 random keys of the rows, of which the second is odd.
        columns: [K], int32 random keys of the columns.
        probability: share of the weights that is dropped.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    probability: float

    @classmethod
    def of_words(cls, rows: torch.Tensor, columns: torch.Tensor, probability: float) -> KeptWeights:
        """The weights of random words [B, A, Q, 2] of the rows and [K] of the columns, int64 in [0, 2^32)."""
        first, second = ((word + _SMALLEST).to(torch.int32) for word in rows.unbind(-1))
        return cls(torch.stack((first, second | 1)), (columns + _SMALLEST).to(torch.int32), probability)

    @property
    def log_scale(self) -> float:
        """Logarithm of the factor of the weights that are kept."""
        return -math.log1p(-self.probability)

    def of(self, tile: Tile) -> KeptWeights:
        """The weights of a tile."""
        samples, heads, queries = tile.queries
        return replace(self, rows=self.rows[:, samples, heads, queries], columns=self.columns[slice(*tile.key)])

    def dropped(self) -> torch.Tensor:
        """Mask [B, A, Q, K], True for a weight that is dropped."""
        word, factor = self.rows.unsqueeze(-1)
        hashed = (word ^ self.columns).mul_(factor)
        # A shift of signed numbers copies the sign, which the mask removes.
        hashed.bitwise_xor_(hashed.bitwise_right_shift(_SHIFT).bitwise_and_(_UNSIGNED)).mul_(_FACTOR)
        dropped: torch.Tensor = hashed < _SMALLEST + round(self.probability * 2**32)
        return dropped

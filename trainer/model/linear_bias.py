"""ALiBi: attention scores fall in proportion to the distance of the key, in each head by its own slope.

Legend: P positions, S those of a pass, B micro-batch, A heads, G query groups, D head width, C bias channels; ``/t`` =
divided over tp, ``/c`` over cp.
Press et al. 2021 (arXiv:2108.12409), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from trainer.config.sections.model import ModelConfig
from trainer.ops.attention.settings import AttentionSettings

_BASE = 256
"""Base of the digits of positions: bfloat16 has all integers up to it."""


@dataclass(frozen=True)
class LinearBias:
    """Channels behind those of queries and keys, which add slope * (k - q) to the score of positions q and k.

    So every attention kernel has the bias, and a cache or a ring of keys carries their positions along. A key holds its
    position in three digits, and a query the slope as a sum of two numbers, so that 16 bits lose nothing. The rounding
    of -slope * q is the same for all keys of a query, and changes no weight; this part keeps the scores of near keys
    small, whose rounding matters.

    Attributes:
        query: [A/t, P, C], or [B, A/t, S, C] of chosen positions; divided by the factor of the scores.
        key: [1, P, C], or [B, 1, S, C] of chosen positions.
    """

    query: torch.Tensor
    key: torch.Tensor

    @classmethod
    def of(
        cls, model: ModelConfig, length: int, dtype: torch.dtype, device: torch.device, tp_rank: int = 0, tp: int = 1
    ) -> LinearBias | None:
        """The channels of ``length`` positions in the heads of one of ``tp`` ranks; None without ALiBi."""
        if model.position_embedding_type != "alibi":
            return None
        heads = model.num_attention_heads // tp
        own = alibi_slopes(model.num_attention_heads)[tp_rank * heads : (tp_rank + 1) * heads]
        slopes = torch.tensor(own, dtype=torch.float64)[:, None] / AttentionSettings.of(model, 0).scale  # [A/t, 1]
        positions = torch.arange(length)
        digits = [positions // _BASE**2 * _BASE, positions // _BASE % _BASE, positions % _BASE]
        of_digits = [place * part for part in _two_numbers(slopes) for place in (_BASE, _BASE, 1)]
        constant, rest = _two_numbers(slopes * -positions / _BASE)  # [A/t, P]
        query = torch.stack([*(part.expand_as(constant) for part in of_digits), constant, rest * _BASE], dim=-1)
        ones = torch.ones_like(positions)
        key = torch.stack([*digits, *digits, _BASE * ones, ones], dim=-1)[None]
        return cls(query.to(device, dtype), key.to(device, dtype))

    def first(self, length: int) -> LinearBias:
        """The channels of the first ``length`` positions (views).

        Raises:
            ValueError: there are fewer positions.
        """
        if length > self.key.shape[1]:
            raise ValueError(f"a sequence of {length} exceeds the {self.key.shape[1]} positions of the model")
        return self.each(lambda part: part[:, :length])

    def at(self, positions: torch.Tensor) -> LinearBias:
        """The channels of ``positions`` [B, S], all of which must lie in this table."""
        return self.each(lambda part: part[:, positions].transpose(0, 1))

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> LinearBias:
        """The channels with both tensors changed in the same way."""
        return LinearBias(change(self.query), change(self.key))

    def behind(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [B, A/t, S/c, D + C] and keys [B, G/t, S/c, D + C] of those with D channels. No communication."""
        wider = ((query, self.query), (key, self.key))
        one, other = (torch.cat((heads, part.expand(*heads.shape[:-1], -1)), dim=-1) for heads, part in wider)
        return one, other


def alibi_slopes(heads: int) -> list[float]:
    """Slope of each head.

    For a power of two the heads have 2^(-8/n), 2^(-16/n), ..., 2^-8. Further heads have every second slope of twice as
    many heads, as in the authors' program, bigscience's Megatron-DeepSpeed and transformers.
    """
    power = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes if power == heads else slopes + alibi_slopes(2 * power)[::2][: heads - power]


def _two_numbers(exact: torch.Tensor) -> list[torch.Tensor]:
    """Two numbers whose sum is ``exact``, the first of them exact in every dtype."""
    rounded = exact.to(torch.bfloat16).to(exact.dtype)
    return [rounded, exact - rounded]

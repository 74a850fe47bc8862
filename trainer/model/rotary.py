"""The table of rotary position embedding; trainer.ops.rotary rotates heads by its angles.

Legend: S sequence, B micro-batch. Su et al. 2021 (arXiv:2104.09864), equation 34.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from trainer.config.sections.model import ModelConfig
from trainer.planning.rope import UNSCALED, RopeScaling


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and sines of the rotation angles, each [S, 1, 1, 1, rotated/2].

    [S, B, 1, 1, rotated/2] if each sample has its own positions.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    query_scale: torch.Tensor | None = None
    """Factor of the queries, of the shape of cosines with one channel; None: 1."""
    long: RotaryTable | None = None
    """Table of rows that are longer than this table; None: there are none."""

    @classmethod
    def build(
        cls,
        length: int,
        rotated: int,
        base: float,
        dtype: torch.dtype,
        device: torch.device,
        scaling: RopeScaling = UNSCALED,
    ) -> RotaryTable:
        """The table of ``length`` positions for the first ``rotated`` channels of each head.

        The angles are float64 products, rounded to ``dtype`` at the end.
        """
        angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies(rotated, base, scaling))
        angles = angles.view(length, 1, 1, 1, rotated // 2)
        cos, sin = ((part * scaling.amplitude).to(device, dtype) for part in (angles.cos(), angles.sin()))
        if scaling.llama_4_scaling_beta == 0.0:
            return cls(cos, sin)
        periods = torch.arange(length, dtype=torch.float64) // scaling.original_max_position_embeddings
        scale = 1 + scaling.llama_4_scaling_beta * torch.log1p(periods)
        return cls(cos, sin, scale.view(length, 1, 1, 1, 1).to(device, dtype))

    @classmethod
    def of(
        cls, model: ModelConfig, length: int, dtype: torch.dtype, device: torch.device, *, local: bool = False
    ) -> RotaryTable | None:
        """The table of a model's layers; None without rope.

        ``local``: the table of the layers with a sliding window; None if they have that of the other layers.
        """
        if model.position_embedding_type != "rope":
            return None
        if not local:
            base, scaling = model.rotary_base, RopeScaling.of(model)
        elif model.rotary_base_local is None:
            return None
        else:
            base, scaling = model.rotary_base_local, UNSCALED
        build = partial(cls.build, rotated=model.rotated_channels, base=base, dtype=dtype, device=device)
        if scaling.rope_type != "longrope":
            return build(length, scaling=scaling)
        long = build(length, scaling=replace(scaling, short_factor=scaling.long_factor))
        return replace(build(min(length, int(scaling.original_max_position_embeddings)), scaling=scaling), long=long)

    def of_rows(self, length: int) -> RotaryTable:
        """The table for rows of ``length`` tokens."""
        return self if self.long is None or length <= len(self.cos) else self.long

    def first(self, length: int) -> RotaryTable:
        """The table of the first ``length`` positions (views).

        Raises:
            ValueError: the table has fewer positions.
        """
        if length > len(self.cos):
            raise ValueError(f"a sequence of {length} exceeds the {len(self.cos)} positions of the rotary table")
        return self.each(lambda part: part[:length])

    def at(self, positions: torch.Tensor) -> RotaryTable:
        """The table of ``positions`` [S, B], all of which must lie in this table."""
        return self.each(lambda part: part[positions].squeeze(2))

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> RotaryTable:
        """The table with every tensor changed in the same way, for rows of one length."""
        scale = None if self.query_scale is None else change(self.query_scale)
        return RotaryTable(change(self.cos), change(self.sin), scale)


def frequencies(rotated: int, base: float, scaling: RopeScaling = UNSCALED) -> torch.Tensor:
    """Radians per position of each pair of channels, float64 [rotated/2]. For sources see trainer.planning.rope."""
    plain = base ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    if scaling.rope_type == "longrope":
        return plain / torch.tensor(scaling.short_factor, dtype=torch.float64)
    if scaling.rope_type == "linear":
        return plain / scaling.factor
    if scaling.rope_type == "llama3":
        turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    elif scaling.rope_type == "yarn":
        kept = _kept_by_yarn(rotated, base, scaling)
    else:
        return plain
    return plain * (kept + (1 - kept) / scaling.factor)


def _kept_by_yarn(rotated: int, base: float, scaling: RopeScaling) -> torch.Tensor:
    """Share of each frequency that is kept (Peng et al. 2023, section 3.2)."""

    def pair_with(turns: float) -> float:
        """Number of the pair that makes so many turns over the old context."""
        length = scaling.original_max_position_embeddings
        return rotated * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    # The bound rotated - 1, though there are only half as many pairs, is that of the published models.
    low, high = max(low, 0), min(high, rotated - 1)
    pairs = torch.arange(rotated // 2, dtype=torch.float64)
    # A ramp without width is a step.
    return 1 - ((pairs - low) / (high - low or 0.001)).clamp(0, 1)

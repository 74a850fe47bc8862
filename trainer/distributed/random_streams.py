"""Random streams addressed by use, independent of earlier draws and parallel layout.

Each use has a separate generator, seeded by a hash of its address: (seed, iteration, micro-batch, layer, site, part).
So dropout is the same for every tp, pp and dp, a recomputed layer repeats its masks, and resuming needs no RNG state.
Counter-style addressing after Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3", section 2.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import torch

DropoutSite = Literal[
    "embedding",
    "attention",
    "attention_output",
    "cross_attention",
    "cross_attention_output",
    "mlp_output",
    "stack_output",
]


def stream_seed(*address: int | str) -> int:
    """63-bit seed from an address; equal on every platform and Python version."""
    # The parts are joined by a byte that occurs in none of them, so that different addresses give different strings.
    digest = hashlib.blake2b("\0".join(map(str, address)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seeded_generator(device: torch.device | str, *address: int | str) -> torch.Generator:
    """Create a generator on ``device`` at the start of the stream with this address."""
    return torch.Generator(device=device).manual_seed(stream_seed(*address))


@dataclass(frozen=True)
class StepRandomness:
    """Random streams of one optimizer step."""

    seed: int
    iteration: int

    def micro_batch(self, index: int) -> MicroBatchRandomness:
        """Random streams of one micro-batch; ``index`` counts over the global batch of all replicas."""
        return MicroBatchRandomness(self.seed, self.iteration, index)


@dataclass(frozen=True)
class MicroBatchRandomness:
    """Random streams of one micro-batch."""

    seed: int
    iteration: int
    micro_batch: int

    def dropout_seed(self, site: DropoutSite, layer: int = 0, part: int = 0) -> int:
        """Seed of one dropout mask.

        Args:
            site: the dropout within the layer.
            layer: number of the layer in the whole model.
            part: number of the stream within the site; attention has several.
        """
        return stream_seed("dropout", self.seed, self.iteration, self.micro_batch, layer, site, part)

    def dropout_generator(
        self, device: torch.device, site: DropoutSite, layer: int = 0, part: int = 0
    ) -> torch.Generator:
        """Generator on ``device`` of one dropout mask; see ``dropout_seed``."""
        return torch.Generator(device=device).manual_seed(self.dropout_seed(site, layer, part))

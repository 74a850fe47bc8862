"""Which virtual stage is which chunk of which pipeline rank. Torch-free.

The model is cut into virtual stages, numbered in the order of forward. A rank holds one of them, or several, which are
its chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

V_CHUNKS = 2
"""Chunks of a rank in a V: one on the way down, one on the way back."""


@dataclass(frozen=True)
class Placement:
    """Virtual stages on pipeline ranks.

    Attributes:
        kind: "one": rank i holds virtual stage i. "loop": the ranks again and again, as in interleaved 1F1B (Narayanan
            et al. 2021, section 2.2). "v": down the ranks and back up, so that the last rank hands over to itself and
            the first one holds both ends of the model (Qi et al. 2023, arXiv:2401.10241, section 6).
        pp: pipeline ranks.
        chunks: virtual stages of each rank.
    """

    kind: Literal["one", "loop", "v"]
    pp: int
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.pp < 1 or self.chunks < 1:
            raise ValueError(f"a pipeline has at least one rank and one chunk, not {self.pp} and {self.chunks}")
        if self.kind == "one" and self.chunks != 1:
            raise ValueError(f'placement "one" has one chunk on each rank, not {self.chunks}')
        if self.kind == "v" and self.chunks != V_CHUNKS:
            raise ValueError(f'placement "v" has two chunks on each rank, not {self.chunks}')

    @property
    def num_virtual_stages(self) -> int:
        """On all ranks together."""
        return self.pp * self.chunks

    def virtual_stage(self, pp_rank: int, chunk: int) -> int:
        """Number of the virtual stage that is ``chunk`` of ``pp_rank``."""
        if self.kind == "v" and chunk == 1:
            return 2 * self.pp - 1 - pp_rank
        return chunk * self.pp + pp_rank

    def place(self, virtual_stage: int) -> tuple[int, int]:
        """(pp_rank, chunk) of a virtual stage."""
        chunk, position = divmod(virtual_stage, self.pp)
        if self.kind == "v" and chunk == 1:
            return self.pp - 1 - position, chunk
        return position, chunk

    @property
    def last_rank(self) -> int:
        """The rank that holds the last virtual stage, with the LM head and the loss."""
        return self.place(self.num_virtual_stages - 1)[0]

"""Division of a sequence over the cp ranks. Torch-free.

Legend: S sequence, c ranks.
With ring attention (``p2p``; Liu et al. 2023, arXiv:2310.01889) a sequence is split into 2c sequence chunks, and rank i
holds chunks i and 2c-1-i, so that a causal mask gives every rank the same work. With ``a2a`` (Jacobs et al. 2023,
arXiv:2309.14509, section 3) a sequence is split into c chunks, and rank i holds chunk i.
"""

from __future__ import annotations

from typing import Literal

CommunicationType = Literal["p2p", "a2a"]


def held_chunks(rank: int, size: int, communication: CommunicationType) -> tuple[int, ...]:
    """Numbers of the sequence chunks that ``rank`` holds, ascending.

    Every rank holds the same number of chunks.
    """
    return (rank, 2 * size - 1 - rank) if communication == "p2p" else (rank,)


def sequence_divisor(size: int, communication: CommunicationType) -> int:
    """Number of sequence chunks, which must divide the sequence length; 1 without context parallelism."""
    return 1 if size == 1 else size * len(held_chunks(0, size, communication))

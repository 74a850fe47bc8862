"""How a sequence is divided over the ranks of cp. Torch-free.

Legend: S sequence, c ranks.
With ring attention (``p2p``; Liu et al. 2023, arXiv:2310.01889) a sequence is cut into 2c chunks and rank i holds the
chunks i and 2c-1-i, so that under a causal mask every rank has the same work. With ``a2a`` (Jacobs et al. 2023,
arXiv:2309.14509, section 3) rank i holds the i-th c-th of it.
"""

from __future__ import annotations

from typing import Literal

CommunicationType = Literal["p2p", "a2a"]


def held_chunks(rank: int, size: int, communication: CommunicationType) -> tuple[int, ...]:
    """Numbers of the chunks of a sequence that ``rank`` holds, ascending.

    Every rank holds as many: a sequence has ``size`` times their number.
    """
    return (rank, 2 * size - 1 - rank) if communication == "p2p" else (rank,)


def sequence_divisor(size: int, communication: CommunicationType) -> int:
    """What the length of a sequence must be a multiple of: the number of its chunks, or 1 where it stays whole."""
    return 1 if size == 1 else size * len(held_chunks(0, size, communication))

"""Names of ranks and nodes in sentences. Pure."""

from typing import Sequence

MOST_NAMED = 4


def rank_words(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 2 and 3``, ``ranks 0 to 6``, ``ranks 0, 2, 3, 5 and 60 more``."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {name_words([str(rank) for rank in ranks])}"


def name_words(names: Sequence[str]) -> str:
    """``n1``, ``n1 and n2``, ``n1, n2, n3, n4 and 60 more``."""
    if len(names) == 1:
        return names[0]
    if len(names) > MOST_NAMED + 1:
        return f"{', '.join(names[:MOST_NAMED])} and {len(names) - MOST_NAMED} more"
    return f"{', '.join(names[:-1])} and {names[-1]}"

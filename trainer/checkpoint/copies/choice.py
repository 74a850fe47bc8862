"""Choice of the copies to go on from, by what each rank finds in its folder. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Found(NamedTuple):
    """A copy that a rank finds in its folder.

    Attributes:
        rank: whose state it is.
        iteration: of the state.
        attempt: that has made it.
        digest: of the layout and the config; see state.digest.
        holder: rank that has written the file, for its name.
    """

    rank: int
    iteration: int
    attempt: int
    digest: str
    holder: int


class Choice(NamedTuple):
    """Copies that together are the state of a run.

    Attributes:
        iteration: of the state.
        attempt: that has made them.
        sources: of each rank, the rank that reads the copy, and the copy.
    """

    iteration: int
    attempt: int
    sources: tuple[tuple[int, Found], ...]


def choose(found: Sequence[Sequence[Found]], digests: Sequence[str]) -> tuple[Choice | None, str]:
    """The newest copies of one iteration and attempt that are the state of all ranks; or the reason for none.

    Args:
        found: of each rank, the copies in its folder that may be used.
        digests: of each rank, the digest of its layout and config.
    """
    places: dict[tuple[int, int], dict[int, list[tuple[int, Found]]]] = {}
    for reader, copies in enumerate(found):
        for each in copies:
            of_ranks = places.setdefault((each.iteration, each.attempt), {})
            of_ranks.setdefault(each.rank, []).append((reader, each))
    reason = ""
    for (iteration, attempt), of_ranks in sorted(places.items(), reverse=True):
        sources = [_source(rank, of_ranks.get(rank, ()), digest) for rank, digest in enumerate(digests)]
        complete = tuple(source for source in sources if source is not None)
        if len(complete) == len(digests):
            return Choice(iteration, attempt, complete), ""
        lacking = [rank for rank, source in enumerate(sources) if source is None]
        is_other = any(rank in of_ranks for rank in lacking)
        if not reason:
            reason = (
                f"those of iteration {iteration} are of another layout or config"
                if is_other
                else f"of iteration {iteration} no sound copy is left of {_ranks(lacking)}"
            )
    return None, reason


def _source(rank: int, places: Sequence[tuple[int, Found]], digest: str) -> tuple[int, Found] | None:
    """The reader and the copy for a rank: its own folder first; None without a copy of its digest."""
    sound = [place for place in places if place[1].digest == digest]
    own = [place for place in sound if place[0] == rank]
    if own:
        return own[0]
    # Ranks of one node see the same files, and share the work.
    return sound[rank % len(sound)] if sound else None


def _ranks(ranks: Sequence[int]) -> str:
    first = ", ".join(map(str, ranks[:4]))
    return f"rank{'s' * (len(ranks) > 1)} {first}" + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")

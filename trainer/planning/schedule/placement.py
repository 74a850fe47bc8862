"""Which virtual stage is which chunk of which pipeline rank, in every pipeline schedule. Torch-free.

The model is cut into virtual stages, numbered in the order of forward. A rank holds one of them, or several, which are
its chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PlacementKind = Literal["one", "loop", "v"]

_KIND_OF: dict[str, PlacementKind] = {"gpipe": "one", "1f1b": "one", "interleaved": "loop", "zb-h1": "one", "zb-v": "v"}
SCHEDULE_KINDS = tuple(_KIND_OF)
"""Values of ``parallel.pipeline_schedule``."""

_V_CHUNKS = 2  # one on the way down, one on the way back


class ScheduleError(ValueError):
    """A schedule that cannot be or cannot run, or not within its memory; the message names rank and action."""


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

    kind: PlacementKind
    pp: int
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.pp < 1 or self.chunks < 1:
            raise ValueError(f"a pipeline has at least one rank and one chunk, not {self.pp} and {self.chunks}")
        if self.kind == "one" and self.chunks != 1:
            raise ValueError(f'placement "one" has one chunk on each rank, not {self.chunks}')
        if self.kind == "v" and self.chunks != _V_CHUNKS:
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


def default_chunks(schedule: str) -> int:
    """The fewest chunks that a schedule can have on each rank; all but interleaved have always as many.

    Raises:
        ScheduleError: no such schedule.
    """
    kind = _kind_of(schedule)
    # Ranks that are passed once in a loop would be 1f1b.
    return {"one": 1, "loop": 2, "v": _V_CHUNKS}[kind]


def placement_of(schedule: str, pp: int, chunks: int) -> Placement:
    """Where the virtual stages lie in a schedule.

    Raises:
        ScheduleError: no such schedule, or not with so many ranks or chunks.
    """
    kind, fewest = _kind_of(schedule), default_chunks(schedule)
    if pp < 1:
        raise ScheduleError(f"a pipeline has at least one rank, not {pp}")
    if chunks < fewest or (chunks > fewest and kind != "loop"):
        wanted = "two or more chunks" if kind == "loop" else ("one chunk", "two chunks")[fewest - 1]
        raise ScheduleError(f"{schedule} has {wanted} on each rank, not {chunks}")
    return Placement(kind, pp, chunks)


def _kind_of(schedule: str) -> PlacementKind:
    if schedule not in _KIND_OF:
        raise ScheduleError(f"there is no pipeline schedule {schedule!r}; there are {', '.join(SCHEDULE_KINDS)}")
    return _KIND_OF[schedule]

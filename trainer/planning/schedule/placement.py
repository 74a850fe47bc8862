"""Placement of virtual stages on pipeline ranks, for every pipeline schedule. Torch-free.

The model is split into virtual stages, numbered in the order of the forward pass. A rank holds one or several of them,
which are its model chunks.
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
    """A schedule that does not exist, cannot run or exceeds its activation bounds."""


@dataclass(frozen=True)
class Placement:
    """Placement of the virtual stages on the pipeline ranks.

    Attributes:
        kind: "one": rank i holds virtual stage i. "loop": round-robin over the ranks, as in interleaved 1F1B (Narayanan
            et al. 2021, section 2.2). "v": down the ranks and back up, so that the last rank sends to itself and the
            first rank holds both ends of the model (Qi et al. 2023, arXiv:2401.10241, section 6).
        pp: number of pipeline ranks.
        chunks: model chunks per rank.
    """

    kind: PlacementKind
    pp: int
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.pp < 1 or self.chunks < 1:
            raise ValueError(f"a pipeline needs at least one rank and one chunk, not {self.pp} and {self.chunks}")
        if self.kind == "one" and self.chunks != 1:
            raise ValueError(f'placement "one" has one chunk on each rank, not {self.chunks}')
        if self.kind == "v" and self.chunks != _V_CHUNKS:
            raise ValueError(f'placement "v" has two chunks on each rank, not {self.chunks}')

    @property
    def num_virtual_stages(self) -> int:
        """Number of virtual stages on all ranks together."""
        return self.pp * self.chunks

    def virtual_stage(self, pp_rank: int, chunk: int) -> int:
        """Number of the virtual stage that is model chunk ``chunk`` of ``pp_rank``."""
        if self.kind == "v" and chunk == 1:
            return 2 * self.pp - 1 - pp_rank
        return chunk * self.pp + pp_rank

    def place(self, virtual_stage: int) -> tuple[int, int]:
        """Pipeline rank and model chunk of a virtual stage."""
        chunk, position = divmod(virtual_stage, self.pp)
        if self.kind == "v" and chunk == 1:
            return self.pp - 1 - position, chunk
        return position, chunk

    @property
    def last_rank(self) -> int:
        """Pipeline rank of the last virtual stage, with LM head and loss."""
        return self.place(self.num_virtual_stages - 1)[0]


def default_chunks(schedule: str) -> int:
    """Fewest model chunks per rank of a schedule; only interleaved allows more.

    Raises:
        ScheduleError: unknown schedule.
    """
    kind = _kind_of(schedule)
    # A loop with one chunk per rank would be 1f1b.
    return {"one": 1, "loop": 2, "v": _V_CHUNKS}[kind]


def placement_of(schedule: str, pp: int, chunks: int) -> Placement:
    """Placement of the virtual stages in a schedule.

    Raises:
        ScheduleError: unknown schedule, or an invalid number of ranks or chunks.
    """
    kind, fewest = _kind_of(schedule), default_chunks(schedule)
    if pp < 1:
        raise ScheduleError(f"a pipeline needs at least one rank, not {pp}")
    if chunks < fewest or (chunks > fewest and kind != "loop"):
        wanted = "two or more chunks" if kind == "loop" else ("one chunk", "two chunks")[fewest - 1]
        raise ScheduleError(f"{schedule} needs {wanted} per rank, not {chunks}")
    return Placement(kind, pp, chunks)


def _kind_of(schedule: str) -> PlacementKind:
    if schedule not in _KIND_OF:
        raise ScheduleError(f"unknown pipeline schedule {schedule!r}; use one of {', '.join(SCHEDULE_KINDS)}")
    return _KIND_OF[schedule]

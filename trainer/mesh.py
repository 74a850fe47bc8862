"""ParallelMesh: which rank sits where on the axes tp, dp and pp, and the process groups of each axis.

Rank order: tp fastest, then dp, then pp (Megatron-LM's ``tp-cp-ep-dp-pp``), so that the ranks that talk most share a
node: Narayanan et al. 2021 (arXiv:2104.04473), Takeaway #1. The mesh is arithmetic only; ``build_process_groups``
talks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from typing_extensions import Self

if TYPE_CHECKING:
    from trainer.config import TrainConfig


@dataclass(frozen=True)
class ParallelMesh:
    """The axis sizes of a job and this rank's place among them."""

    tp: int
    pp: int
    dp: int
    rank: int

    @classmethod
    def build(cls, config: TrainConfig, rank: int, world_size: int) -> Self:
        """The mesh that ``config`` asks for over ``world_size`` ranks, seen from ``rank``.

        Raises:
            ConfigError: the layout or the batch size does not fit the world size.
        """
        config.check_world_size(world_size)
        return cls(
            tp=config.parallel.tensor_model_parallel_size,
            pp=config.parallel.pipeline_model_parallel_size,
            dp=config.data_parallel_size(world_size),
            rank=rank,
        )

    @property
    def world_size(self) -> int:
        """Number of ranks on the mesh."""
        return self.tp * self.pp * self.dp

    @property
    def tp_rank(self) -> int:
        """Place on the tensor-parallel axis."""
        return self.rank % self.tp

    @property
    def dp_rank(self) -> int:
        """Place on the data-parallel axis: which replica."""
        return self.rank // self.tp % self.dp

    @property
    def pp_rank(self) -> int:
        """Place on the pipeline axis: which stage."""
        return self.rank // (self.tp * self.dp)

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the LM head and computes the loss."""
        return self.pp_rank == self.pp - 1

    def rank_at(self, *, tp_rank: int, dp_rank: int, pp_rank: int) -> int:
        """The rank with these coordinates."""
        return tp_rank + self.tp * (dp_rank + self.dp * pp_rank)

    def at(self, rank: int) -> ParallelMesh:
        """The same mesh seen from another rank."""
        return ParallelMesh(tp=self.tp, pp=self.pp, dp=self.dp, rank=rank)

    @property
    def tp_ranks(self) -> tuple[int, ...]:
        """Ranks that hold the other slices of this rank's tensors, itself included."""
        return tuple(
            self.rank_at(tp_rank=tp_rank, dp_rank=self.dp_rank, pp_rank=self.pp_rank) for tp_rank in range(self.tp)
        )

    @property
    def dp_ranks(self) -> tuple[int, ...]:
        """Ranks that hold the same parameters as this one, itself included."""
        return tuple(
            self.rank_at(tp_rank=self.tp_rank, dp_rank=dp_rank, pp_rank=self.pp_rank) for dp_rank in range(self.dp)
        )

    @property
    def pp_ranks(self) -> tuple[int, ...]:
        """Ranks of this rank's pipeline, first stage first."""
        return tuple(
            self.rank_at(tp_rank=self.tp_rank, dp_rank=self.dp_rank, pp_rank=pp_rank) for pp_rank in range(self.pp)
        )

    @property
    def embedding_ranks(self) -> tuple[int, ...]:
        """First and last rank of this rank's pipeline: they share a tied embedding."""
        return tuple(dict.fromkeys((self.pp_ranks[0], self.pp_ranks[-1])))

    @property
    def model_parallel_ranks(self) -> tuple[int, ...]:
        """Ranks that together hold one replica of the model (tp x pp)."""
        return tuple(
            self.rank_at(tp_rank=tp_rank, dp_rank=self.dp_rank, pp_rank=pp_rank)
            for pp_rank in range(self.pp)
            for tp_rank in range(self.tp)
        )

    def describe(self, rank: int) -> str:
        """A rank with its coordinates, for people: ``rank 5 (pp 1, dp 0, tp 1)``."""
        place = self.at(rank)
        return f"rank {rank} (pp {place.pp_rank}, dp {place.dp_rank}, tp {place.tp_rank})"


@dataclass(frozen=True)
class ProcessGroups:
    """This rank's group on each axis; None where it would hold this rank alone, and callers skip the collective.

    ``embedding`` is None on the stages between the first and the last too.
    """

    tp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None
    dp: dist.ProcessGroup | None = None
    embedding: dist.ProcessGroup | None = None
    model_parallel: dist.ProcessGroup | None = None


def build_process_groups(mesh: ParallelMesh, timeout: timedelta, ranks: Sequence[int] | None = None) -> ProcessGroups:
    """Create the groups of every axis.

    Collective: all ranks of the default group must call it, with the same sizes, in the same order of calls; the ranks
    outside the mesh too, where there are any (they get no groups; ``mesh.rank`` is not read).

    Args:
        mesh: the axis sizes.
        timeout: how long a collective of these groups may take before it fails.
        ranks: global ranks that the mesh lies on, in its order. Unset: 0 .. mesh.world_size - 1.
    """
    places = tuple(ranks) if ranks is not None else tuple(range(mesh.world_size))
    if len(places) != mesh.world_size or len(set(places)) != len(places):
        raise ValueError(f"a mesh of {mesh.world_size} ranks cannot lie on the ranks {places}")
    this_rank = dist.get_rank()
    mine: dict[str, dist.ProcessGroup] = {}
    for axis, members in _axis_groups(mesh):
        group_ranks = [places[member] for member in members]
        # Every rank creates every group: new_group is collective over the default group, members or not.
        group = dist.new_group(group_ranks, timeout=timeout)
        if this_rank in group_ranks:
            mine[axis] = group
    return ProcessGroups(**mine)


def _axis_groups(mesh: ParallelMesh) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Axis and members of every group with more than one member, once each, in one order on all ranks."""
    for axis in ("tp", "pp", "dp", "embedding", "model_parallel"):
        groups = dict.fromkeys(getattr(mesh.at(rank), f"{axis}_ranks") for rank in range(mesh.world_size))
        yield from ((axis, members) for members in groups if len(members) > 1)

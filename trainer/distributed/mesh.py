"""ParallelMesh: which rank sits where on the axes tp, cp, dp and pp, and the process groups of each axis.

Rank order: tp fastest, then cp, dp, pp (Megatron-LM's ``tp-cp-ep-dp-pp``), so that the ranks that talk most share a
node: Narayanan et al. 2021 (arXiv:2104.04473), Takeaway #1. Experts are divided over groups of neighbours within
dp x cp; what is left of dp x cp holds copies of the same experts. The mesh is arithmetic only;
``build_process_groups`` talks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from typing_extensions import Self

from trainer.distributed.collectives import is_gloo
from trainer.planning.checks import check_world_size
from trainer.planning.pipeline import pipeline_placement

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig


def copies_of_groups(groups: int, tp: int) -> int:
    """How many tensor-parallel ranks in a row hold the same query group; 1 where each has whole ones of its own."""
    return max(1, tp // groups)


@dataclass(frozen=True)
class ParallelMesh:
    """The axis sizes of a job and this rank's place among them.

    Attributes:
        ep: ranks of dp x cp that share the experts of a layer.
        kv_copies: tensor-parallel ranks in a row that hold the same key and value heads; above 1 where tp exceeds
            their number.
        loss_pp_rank: place on the pipeline axis of the rank that holds the LM head, counted from the end as in a
            sequence; -1 is the last.
        tied_table: embedding and LM head share one table, which the two ranks that hold them have to keep alike.
    """

    tp: int
    pp: int
    dp: int
    rank: int
    cp: int = 1
    ep: int = 1
    kv_copies: int = 1
    loss_pp_rank: int = -1
    tied_table: bool = True

    @classmethod
    def build(cls, config: TrainConfig, rank: int, world_size: int) -> Self:
        """The mesh that ``config`` asks for over ``world_size`` ranks, seen from ``rank``.

        Raises:
            ConfigError: the layout or the batch size does not fit the world size.
        """
        check_world_size(config, world_size)
        parallel = config.parallel
        return cls(
            tp=parallel.tensor_model_parallel_size,
            pp=parallel.pipeline_model_parallel_size,
            dp=config.data_parallel_size(world_size),
            cp=parallel.context_parallel_size,
            ep=parallel.expert_model_parallel_size,
            kv_copies=copies_of_groups(config.model.query_groups, parallel.tensor_model_parallel_size),
            loss_pp_rank=pipeline_placement(config).last_rank - parallel.pipeline_model_parallel_size,
            tied_table=not config.model.untie_embeddings_and_output_weights,
            rank=rank,
        )

    @property
    def world_size(self) -> int:
        """Number of ranks on the mesh."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def tp_rank(self) -> int:
        """Place on the tensor-parallel axis."""
        return self.rank % self.tp

    @property
    def cp_rank(self) -> int:
        """Place on the context-parallel axis: which part of each sequence."""
        return self.rank // self.tp % self.cp

    @property
    def dp_rank(self) -> int:
        """Place on the data-parallel axis: which replica."""
        return self.rank // (self.tp * self.cp) % self.dp

    @property
    def pp_rank(self) -> int:
        """Place on the pipeline axis."""
        return self.rank // (self.tp * self.cp * self.dp)

    @property
    def data_size(self) -> int:
        """Ranks that hold the same dense parameters: dp x cp."""
        return self.dp * self.cp

    @property
    def data_rank(self) -> int:
        """Place among the ranks that hold the same dense parameters; cp is fastest."""
        return self.cp_rank + self.cp * self.dp_rank

    @property
    def ep_rank(self) -> int:
        """Place among the ranks that share the experts of a layer."""
        return self.data_rank % self.ep

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts."""
        return self.data_size // self.ep

    @property
    def expert_dp_rank(self) -> int:
        """Place among the ranks that hold the same experts."""
        return self.data_rank // self.ep

    def copies(self, is_expert: bool) -> int:
        """Ranks that hold the same parameters as this one: those of experts, or all others."""
        return self.expert_dp if is_expert else self.data_size

    def copy_rank(self, is_expert: bool) -> int:
        """Place among the ranks that hold the same parameters: those of experts, or all others."""
        return self.expert_dp_rank if is_expert else self.data_rank

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def computes_loss(self) -> bool:
        """Whether this rank holds the LM head and computes the loss."""
        return self.pp_rank - self.pp == self.loss_pp_rank

    def at(self, rank: int) -> ParallelMesh:
        """The same mesh seen from another rank."""
        return replace(self, rank=rank)

    @property
    def tp_ranks(self) -> tuple[int, ...]:
        """Ranks that hold the other slices of this rank's tensors, itself included."""
        first = self.rank - self.tp_rank
        return tuple(range(first, first + self.tp))

    @property
    def kv_ranks(self) -> tuple[int, ...]:
        """Ranks of the tp group that hold the same key and value heads as this one, itself included."""
        first = self.rank - self.tp_rank % self.kv_copies
        return tuple(range(first, first + self.kv_copies))

    @property
    def cp_ranks(self) -> tuple[int, ...]:
        """Ranks that hold the other parts of this rank's sequences, itself included."""
        return tuple(self.rank + self.tp * (place - self.cp_rank) for place in range(self.cp))

    @property
    def dp_cp_ranks(self) -> tuple[int, ...]:
        """Ranks that hold the same dense parameters as this one, itself included."""
        return self._data_ranks(range(self.data_size))

    @property
    def ep_ranks(self) -> tuple[int, ...]:
        """Ranks that share the experts of a layer with this one, itself included."""
        first = self.data_rank - self.ep_rank
        return self._data_ranks(range(first, first + self.ep))

    @property
    def expert_dp_ranks(self) -> tuple[int, ...]:
        """Ranks that hold the same experts as this one, itself included."""
        return self._data_ranks(range(self.ep_rank, self.data_size, self.ep))

    def _data_ranks(self, places: range) -> tuple[int, ...]:
        return tuple(self.rank + self.tp * (place - self.data_rank) for place in places)

    @property
    def pp_ranks(self) -> tuple[int, ...]:
        """Ranks of this rank's pipeline, first stage first."""
        step = self.tp * self.cp * self.dp
        return tuple(self.rank + step * (place - self.pp_rank) for place in range(self.pp))

    @property
    def embedding_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's pipeline with embedding and LM head; one alone where they share no table."""
        ends = (self.pp_ranks[0], self.pp_ranks[self.loss_pp_rank]) if self.tied_table else self.pp_ranks[:1]
        return tuple(dict.fromkeys(ends))

    def describe(self, rank: int) -> str:
        """A rank with its coordinates, for people: ``rank 5 (pp 1, dp 0, tp 1)``; cp and ep where there are any."""
        place = self.at(rank)
        coordinates = [f"pp {place.pp_rank}", f"dp {place.dp_rank}"]
        coordinates += [f"cp {place.cp_rank}"] if self.cp > 1 else []
        coordinates += [f"tp {place.tp_rank}"]
        coordinates += [f"ep {place.ep_rank}"] if self.ep > 1 else []
        return f"rank {rank} ({', '.join(coordinates)})"


@dataclass(frozen=True)
class ProcessGroups:
    """This rank's group on each axis; None where it would hold this rank alone, and callers skip the collective.

    Attributes:
        tp: slices of the same tensors.
        kv: part of tp that holds the same key and value heads.
        cp: parts of the same sequences.
        dp_cp: copies of the same dense parameters: what their gradients are summed over.
        ep: parts of the same layers' experts.
        expert_dp: copies of the same experts: what their gradients are summed over. The same group as ``dp_cp`` without
            expert parallelism: each is a communicator with buffers of its own, and what passes through these two is
            issued in one order on all ranks, as buckets or units. Other axes may have the same members and still have
            their own group: a layer's messages (tp, cp, ep, pp) would queue behind the gradients that are under way.
        pp: the pipeline; messages to later ranks, and with gloo all.
        pp_up: the pipeline again, for messages to earlier ranks, so that on a backend without tags a send never
            queues behind a receive. The same group as ``pp`` with gloo.
        embedding: the two ranks of the pipeline that share a tied table; None on the ranks between, and everywhere
            where no table is tied.
    """

    tp: dist.ProcessGroup | None = None
    kv: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None
    dp_cp: dist.ProcessGroup | None = None
    ep: dist.ProcessGroup | None = None
    expert_dp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None
    pp_up: dist.ProcessGroup | None = None
    embedding: dist.ProcessGroup | None = None

    def copies(self, is_expert: bool) -> dist.ProcessGroup | None:
        """The ranks that hold the same parameters: those of experts, or all others."""
        return self.expert_dp if is_expert else self.dp_cp


def build_process_groups(mesh: ParallelMesh, timeout: timedelta) -> ProcessGroups:
    """Create the groups of every axis.

    Collective: all ranks of the default group must call it, with the same sizes, in the same order of calls; the ranks
    outside the mesh too, where there are any (they get no groups; ``mesh.rank`` is not read).

    Args:
        mesh: the axis sizes.
        timeout: how long a collective of these groups may take before it fails.
    """
    this_rank = dist.get_rank()
    has_tags = is_gloo(None)
    mine: dict[str, dist.ProcessGroup] = {}
    for axis, members in _axis_groups(mesh, has_tags):
        # Every rank creates every group: new_group is collective over the default group, members or not.
        group = dist.new_group(list(members), timeout=timeout)
        if this_rank in members:
            mine[axis] = group
    if has_tags and "pp" in mine:
        mine["pp_up"] = mine["pp"]
    if mesh.ep == 1 and "dp_cp" in mine:
        mine["expert_dp"] = mine["dp_cp"]
    return ProcessGroups(**mine)


def _axis_groups(mesh: ParallelMesh, has_tags: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Axis and members of every group to create, of more than one member each, in one order on all ranks."""
    for axis in (field.name for field in fields(ProcessGroups)):
        if (axis == "pp_up" and has_tags) or (axis == "expert_dp" and mesh.ep == 1):
            continue
        attribute = "pp_ranks" if axis == "pp_up" else f"{axis}_ranks"
        groups = dict.fromkeys(getattr(mesh.at(rank), attribute) for rank in range(mesh.world_size))
        yield from ((axis, members) for members in groups if len(members) > 1)

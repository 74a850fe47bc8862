"""ParallelMesh: coordinates of the ranks on the axes, and their process groups.

Rank order: tp fastest, then cp, dp, pp (Megatron-LM's ``tp-cp-ep-dp-pp``), so that the ranks that communicate most
share a node: Narayanan et al. 2021 (arXiv:2104.04473), Takeaway #1. On request pp comes before dp. Experts are divided
over groups of ep neighbours within dp x cp; the (dp x cp) / ep ranks of the other direction hold copies of the same
experts. Where fewer ranks than tp divide an expert (Megatron-LM's expert_tensor_parallel_size; Liu et al. 2025,
arXiv:2504.14960, section 3.2), the other tp ranks count with dp x cp. The mesh is arithmetic only;
``build_process_groups`` communicates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from typing_extensions import Self

from trainer.distributed.collectives import is_gloo
from trainer.planning.checks import check_world_size
from trainer.planning.pipeline import pipeline_placement

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig


def copies_of_groups(groups: int, tp: int) -> int:
    """Number of consecutive tp ranks that hold the same query group."""
    return max(1, tp // groups)


@dataclass(frozen=True)
class ParallelMesh:
    """Axis sizes of a job and the coordinates of this rank.

    Attributes:
        ep: number of ranks over which the experts of a layer are divided.
        expert_shares: number of groups of tp neighbours, each of which divides its experts alone; 1 if all tp ranks
            divide every expert, tp if each expert is whole on its rank.
        kv_copies: number of consecutive tp ranks that hold the same key and value heads; above 1 if tp exceeds the
            number of these heads.
        loss_pp_rank: coordinate on the pipeline axis of the rank with the LM head, as a negative index; -1 is the last
            rank.
        tied_table: True if the rank with the LM head has the word table too, as its own table or for multi-token
            prediction, so that the two ranks that hold it keep it equal.
        pp_before_dp: True if pipelines are on neighbouring ranks, and dp is the slowest axis.
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
    pp_before_dp: bool = False
    expert_shares: int = 1

    @classmethod
    def build(cls, config: TrainConfig, rank: int, world_size: int) -> Self:
        """Build the mesh of ``config`` over ``world_size`` ranks, as seen from ``rank``.

        Raises:
            ConfigError: the parallel layout or the batch size does not fit the world size.
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
            tied_table=not config.model.untie_embeddings_and_output_weights or config.model.mtp_num_layers > 0,
            expert_shares=parallel.expert_shares if config.model.num_experts is not None else 1,
            pp_before_dp=parallel.rank_order == "tp-cp-ep-pp-dp",
            rank=rank,
        )

    @property
    def world_size(self) -> int:
        """Number of ranks on the mesh."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def tp_rank(self) -> int:
        """Coordinate on the tensor-parallel axis."""
        return self.rank % self.tp

    @property
    def cp_rank(self) -> int:
        """Coordinate on the context-parallel axis, which selects the sequence chunks."""
        return self.rank // self.tp % self.cp

    @property
    def dp_rank(self) -> int:
        """Coordinate on the data-parallel axis: the number of the replica."""
        return self.rank // self._dp_step % self.dp

    @property
    def pp_rank(self) -> int:
        """Coordinate on the pipeline axis."""
        return self.rank // self._pp_step % self.pp

    @property
    def _dp_step(self) -> int:
        return self.tp * self.cp * (self.pp if self.pp_before_dp else 1)

    @property
    def _pp_step(self) -> int:
        return self.tp * self.cp * (1 if self.pp_before_dp else self.dp)

    @property
    def data_size(self) -> int:
        """Number of ranks that hold the same dense parameters: dp x cp."""
        return self.dp * self.cp

    @property
    def data_rank(self) -> int:
        """Index among the ranks that hold the same dense parameters; cp is fastest."""
        return self.cp_rank + self.cp * self.dp_rank

    @property
    def expert_tp(self) -> int:
        """Number of tp ranks that divide an expert."""
        return self.tp // self.expert_shares

    @property
    def expert_tp_rank(self) -> int:
        """Index among the tp ranks that divide the same experts."""
        return self.tp_rank % self.expert_tp

    @property
    def expert_share(self) -> int:
        """Part of the tokens that this rank brings to the experts."""
        return self.tp_rank // self.expert_tp

    @property
    def _expert_place(self) -> int:
        """Index among the ranks that divide the experts of a layer or hold copies of them."""
        return self.expert_share + self.expert_shares * self.data_rank

    @property
    def _expert_places(self) -> int:
        return self.expert_shares * self.data_size

    @property
    def ep_rank(self) -> int:
        """Index among the ranks over which the experts of a layer are divided."""
        return self._expert_place % self.ep

    @property
    def expert_dp(self) -> int:
        """Number of ranks that hold the same experts."""
        return self._expert_places // self.ep

    @property
    def expert_dp_rank(self) -> int:
        """Index among the ranks that hold the same experts."""
        return self._expert_place // self.ep

    @property
    def copies_experts_as_dense(self) -> bool:
        """True if the ranks that hold the same dense parameters are those that hold the same experts."""
        return self.ep == 1 and self.expert_shares == 1

    def copies(self, is_expert: bool) -> int:
        """Number of ranks that hold the same expert or dense parameters as this rank."""
        return self.expert_dp if is_expert else self.data_size

    def copy_rank(self, is_expert: bool) -> int:
        """Index among the ranks that hold the same expert or dense parameters."""
        return self.expert_dp_rank if is_expert else self.data_rank

    @property
    def is_first_stage(self) -> bool:
        """True if this rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def computes_loss(self) -> bool:
        """True if this rank holds the LM head and computes the loss."""
        return self.pp_rank - self.pp == self.loss_pp_rank

    def at(self, rank: int) -> ParallelMesh:
        """Return the mesh as seen from another rank."""
        return replace(self, rank=rank)

    @property
    def tp_ranks(self) -> tuple[int, ...]:
        """Ranks that hold the slices of the same tensors, including this rank."""
        first = self.rank - self.tp_rank
        return tuple(range(first, first + self.tp))

    @property
    def etp_ranks(self) -> tuple[int, ...]:
        """Ranks of tp that divide the same experts, including this rank."""
        first = self.rank - self.expert_tp_rank
        return tuple(range(first, first + self.expert_tp))

    @property
    def kv_ranks(self) -> tuple[int, ...]:
        """Ranks of tp with the same key and value heads, including this rank."""
        first = self.rank - self.tp_rank % self.kv_copies
        return tuple(range(first, first + self.kv_copies))

    @property
    def cp_ranks(self) -> tuple[int, ...]:
        """Ranks that hold the chunks of the same sequences, including this rank."""
        return tuple(self.rank + self.tp * (place - self.cp_rank) for place in range(self.cp))

    @property
    def dp_cp_ranks(self) -> tuple[int, ...]:
        """Ranks that hold the same dense parameters, including this rank."""
        return self._data_ranks(range(self.data_size))

    @property
    def ep_ranks(self) -> tuple[int, ...]:
        """Ranks over which the experts of a layer are divided, including this rank."""
        first = self._expert_place - self.ep_rank
        return self._expert_ranks(range(first, first + self.ep))

    @property
    def expert_dp_ranks(self) -> tuple[int, ...]:
        """Ranks that hold the same experts, including this rank."""
        return self._expert_ranks(range(self.ep_rank, self._expert_places, self.ep))

    def _expert_ranks(self, places: range) -> tuple[int, ...]:
        """Ranks with this rank's part of the experts at ``places``."""
        found = []
        for place in places:
            data, share = divmod(place, self.expert_shares)
            (rank,) = self._data_ranks(range(data, data + 1))
            found.append(rank + (share - self.expert_share) * self.expert_tp)
        return tuple(found)

    def _data_ranks(self, places: range) -> tuple[int, ...]:
        first = self.rank - self.tp * self.cp_rank - self._dp_step * self.dp_rank
        return tuple(first + self.tp * (place % self.cp) + self._dp_step * (place // self.cp) for place in places)

    @property
    def pp_ranks(self) -> tuple[int, ...]:
        """Ranks of this rank's pipeline, first stage first."""
        return tuple(self.rank + self._pp_step * (place - self.pp_rank) for place in range(self.pp))

    @property
    def embedding_ranks(self) -> tuple[int, ...]:
        """Ranks of this pipeline with the word table.

        Without a tied table only the rank with the embedding.
        """
        ends = (self.pp_ranks[0], self.pp_ranks[self.loss_pp_rank]) if self.tied_table else self.pp_ranks[:1]
        return tuple(dict.fromkeys(ends))

    def describe(self, rank: int) -> str:
        """Rank with its coordinates as text: ``rank 5 (pp 1, dp 0, tp 1)``.

        The text has cp and ep only if they are above 1.
        """
        place = self.at(rank)
        coordinates = [f"pp {place.pp_rank}", f"dp {place.dp_rank}"]
        coordinates += [f"cp {place.cp_rank}"] if self.cp > 1 else []
        coordinates += [f"tp {place.tp_rank}"]
        coordinates += [f"ep {place.ep_rank}"] if self.ep > 1 else []
        return f"rank {rank} ({', '.join(coordinates)})"


@dataclass(frozen=True)
class ProcessGroups:
    """Process groups of this rank.

    A group of one rank is None, and callers skip the collective.

    Attributes:
        tp: ranks with slices of the same tensors.
        etp: ranks of tp that divide the same experts; the same group as ``tp`` where all do.
        kv: ranks of tp with the same key and value heads.
        cp: ranks with chunks of the same sequences.
        dp_cp: ranks with the same dense parameters, over which their gradients are summed.
        ep: ranks over which the experts of a layer are divided.
        expert_dp: ranks with the same experts, over which their gradients are summed. Where all ranks of ``dp_cp`` hold
            the same experts it is the same group, which saves a communicator with its buffers; all ranks issue the
            messages of both in one order, as buckets or units. Other axes with equal members still have separate
            groups: a layer's messages (tp, cp, ep, pp) would otherwise queue behind pending gradients.
        pp: ranks of the pipeline, for messages to later ranks; with gloo for all messages.
        pp_up: ranks of the pipeline, for messages to earlier ranks, so that on a backend without tags a send never
            queues behind a receive. The same group as ``pp`` with gloo.
        embedding: the two ranks of the pipeline that hold the word table; None on the ranks between, and on all ranks
            if only one holds it.
    """

    tp: dist.ProcessGroup | None = None
    etp: dist.ProcessGroup | None = None
    kv: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None
    dp_cp: dist.ProcessGroup | None = None
    ep: dist.ProcessGroup | None = None
    expert_dp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None
    pp_up: dist.ProcessGroup | None = None
    embedding: dist.ProcessGroup | None = None

    def copies(self, is_expert: bool) -> dist.ProcessGroup | None:
        """Group of the ranks that hold the same expert or dense parameters."""
        return self.expert_dp if is_expert else self.dp_cp


# Group -> its name in parallel.high_priority_stream_groups; those of gradients within a replica have none.
_NAMES = {
    **{axis: axis for axis in ("tp", "cp", "ep", "pp")},
    "kv": "tp",
    "pp_up": "pp",
    "dp_cp": "dp",
    "expert_dp": "dp",
}


def has_high_priority(group: str, backend: str, chosen: Collection[str]) -> bool:
    """True if the kernels of a group's messages go before waiting kernels of other streams.

    A GPU starts blocks of the streams with the highest priority first: messages that overlap with computation do not
    wait until a matrix product has given all its blocks away. Of no effect for collectives without ``async_op``, which
    torch runs on the stream of the computation (pytorch/pytorch#150398).

    Args:
        group: name of a field of ProcessGroups.
        backend: of the job; only NCCL has streams.
        chosen: parallel.high_priority_stream_groups.
    """
    return backend == "nccl" and _NAMES.get(group) in chosen


def build_process_groups(mesh: ParallelMesh, timeout: timedelta, high_priority: Collection[str] = ()) -> ProcessGroups:
    """Create the process groups of every axis.

    Collective: all ranks of the default group, with the same sizes and in the same order of calls. Ranks outside the
    mesh must call it too; they get no groups. ``mesh.rank`` is not read.

    Args:
        mesh: the axis sizes.
        timeout: timeout of the collectives of these groups.
        high_priority: parallel.high_priority_stream_groups.
    """
    this_rank = dist.get_rank()
    has_tags = is_gloo(None)
    mine: dict[str, dist.ProcessGroup] = {}
    for axis, members in _axis_groups(mesh, has_tags):
        # Every rank creates every group: new_group is collective over the default group, members or not.
        options = _options(has_high_priority(axis, str(dist.get_backend()), high_priority), timeout)
        group = dist.new_group(list(members), timeout=timeout, pg_options=options, group_desc=axis)
        if this_rank in members:
            mine[axis] = group
    if has_tags and "pp" in mine:
        mine["pp_up"] = mine["pp"]
    for own, other in _same_groups(mesh).items():
        if other in mine:
            mine[own] = mine[other]
    return ProcessGroups(**mine)


def _same_groups(mesh: ParallelMesh) -> dict[str, str]:
    """Groups of experts that are another group too."""
    same = {"etp": "tp"} if mesh.expert_shares == 1 else {}
    return {**same, "expert_dp": "dp_cp"} if mesh.copies_experts_as_dense else same


def _options(is_high_priority: bool, timeout: timedelta) -> Any:
    """Options of one group, which torch completes: no other group may use them."""
    if not is_high_priority:
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # torch warns of options with another timeout than the group's.
    options._timeout = timeout
    return options


def _axis_groups(mesh: ParallelMesh, has_tags: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Axis and members of every group, in the same order on all ranks.

    Groups with one member are left out.
    """
    for axis in (field.name for field in fields(ProcessGroups)):
        if (axis == "pp_up" and has_tags) or axis in _same_groups(mesh):
            continue
        attribute = "pp_ranks" if axis == "pp_up" else f"{axis}_ranks"
        groups = dict.fromkeys(getattr(mesh.at(rank), attribute) for rank in range(mesh.world_size))
        yield from ((axis, members) for members in groups if len(members) > 1)

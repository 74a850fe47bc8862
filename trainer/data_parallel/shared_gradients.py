"""Gradient sums over the ranks of one replica that share a parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from trainer.data_parallel.parameter_shards import ParameterShard
    from trainer.distributed.mesh import ParallelMesh, ProcessGroups
    from trainer.model.sharding import ParameterLayout


def sum_shared_gradients(
    parameter_shards: Sequence[ParameterShard],
    layouts: Mapping[str, ParameterLayout],
    mesh: ParallelMesh,
    groups: ProcessGroups,
) -> None:
    """Complete the gradients of parameters that several ranks of a replica hold. In place.

    Collective: all ranks.

    Ranks that share a parameter hold the same shards, so that shards are summed without any exchange of ranges. In
    this order:

    - over tp, if every rank sees only a part of the parameter's inputs. Sequence parallelism needs this for norms and
      biases: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2.
      The bias of experts over the ranks of tp that divide one.
    - over the tensor-parallel ranks that hold copies of the same key and value heads.
    - between the first stage and that of the LM head, for a word table that both hold.
    """
    partial = [p for p in parameter_shards if layouts[p.name].partial_over_tp]
    _sum([p.gradient for p in partial if not layouts[p.name].is_expert], groups.tp)
    _sum([p.gradient for p in partial if layouts[p.name].is_expert], groups.etp)
    _sum(list(_key_value_ranges(parameter_shards, layouts, mesh)), groups.kv)
    _sum([p.gradient for p in parameter_shards if layouts[p.name].tied_over_stages], groups.embedding)


def _key_value_ranges(
    parameter_shards: Sequence[ParameterShard], layouts: Mapping[str, ParameterLayout], mesh: ParallelMesh
) -> Iterable[Tensor]:
    for shard in parameter_shards:
        if layouts[shard.name].has_kv_copies(mesh):
            key_value = layouts[shard.name].boxes(mesh)[-1]
            low, high = max(shard.start, key_value.start), min(shard.stop, key_value.stop)
            if low < high:
                yield shard.gradient[low - shard.start : high - shard.start]


def _sum(parts: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    if group is None or not parts:
        return
    if len(parts) == 1:
        dist.all_reduce(parts[0], group=group)
        return
    # One message for all parts, because norms and biases are small and many.
    packed = torch.cat(list(parts))
    dist.all_reduce(packed, group=group)
    for part, total in zip(parts, torch.split(packed, [part.numel() for part in parts]), strict=True):
        part.copy_(total)

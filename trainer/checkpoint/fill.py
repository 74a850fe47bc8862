"""Filling of a rank's shard of a tensor from blocks of the global tensor, whatever divides either."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from trainer.checkpoint.directory import CheckpointError
from trainer.checkpoint.regions import Region, overlap, regions_of_flat_range
from trainer.optimizer.split_master import Master, Own

if TYPE_CHECKING:
    from trainer.data_parallel.parameter_shards import StoredShard
    from trainer.parallel_model import ParallelModel


class Block(NamedTuple):
    """A box of a global tensor that can be read.

    Attributes:
        offset: first index in each dim.
        shape: extent in each dim.
        read: returns the elements, of ``shape``; called only if some are needed.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@torch.no_grad()
def fill_shard(
    what: str,
    model: ParallelModel,
    shard: StoredShard,
    target: Master,
    blocks: Callable[[Region], Iterable[Block]],
) -> None:
    """Copy a rank's shard of a global tensor into ``target``, 1-D; vocabulary padding becomes zeros.

    Args:
        what: name of the tensor, for messages.
        model: has the layout of the parameter.
        shard: the part of the parameter that the rank keeps.
        target: as many elements as the shard.
        blocks: region -> at least the blocks that overlap with it.

    Raises:
        CheckpointError: the blocks leave gaps, or overlap.
    """
    end = 0
    for box in model.layouts[shard.name].boxes(model.mesh):
        low, high = max(shard.start, box.start), min(shard.stop, box.stop)
        if low >= high:
            continue
        target[end : low - shard.start].zero_()
        end = high - shard.start
        for region in regions_of_flat_range(box.offset, box.shape, low - box.start, high - box.start):
            first = box.start + region.start - shard.start
            view = target[first : first + math.prod(region.shape)].view(region.shape)
            fill_region(what, blocks(region), region, view)
    target[end:].zero_()


@torch.no_grad()
def fill_region(what: str, blocks: Iterable[Block], requested: Region, target: Master) -> None:
    """Copy a region of a global tensor into ``target``, of the region's shape, from the blocks that overlap with it.

    Raises:
        CheckpointError: the blocks leave gaps, or overlap.
    """
    found = 0
    # If one block has the whole region, counting elements is enough to detect gaps and overlaps.
    is_filled: Tensor | None = None
    for block in blocks:
        common = overlap(requested.offset, requested.shape, block.offset, block.shape)
        if common is None:
            continue
        _cut(target, requested.offset, *common).copy_(_cut(block.read(), block.offset, *common))
        found += math.prod(common[1])
        if common[1] != requested.shape:
            is_filled = torch.zeros(requested.shape, dtype=torch.bool) if is_filled is None else is_filled
            _cut(is_filled, requested.offset, *common).fill_(True)
    filled = found if is_filled is None else int(is_filled.sum())
    if found != target.numel() or filled != target.numel():
        problem = "overlaps itself" if found > filled or found > target.numel() else "is incomplete"
        raise CheckpointError(
            f"{what} {problem}: {found} elements, {filled} of them distinct, instead of {target.numel()}; the "
            "checkpoint is damaged, choose another"
        )


def _cut(tensor: Own, origin: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...]) -> Own:
    """The box at ``offset`` of a global tensor, cut from ``tensor``.

    ``tensor`` is the box at ``origin``.
    """
    for dim, (first, length) in enumerate(zip(offset, shape, strict=True)):
        tensor = tensor.narrow(dim, first - origin[dim], length)
    return tensor

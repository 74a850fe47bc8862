"""Measurements of messages between the ranks of a node, one rank of each node, and all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trainer.distributed.collectives import all_gather_single, max_over_ranks, reduce_scatter_single
from trainer.speed_test.device_speed import dtype_of, name_of
from trainer.speed_test.sample import Sample
from trainer.speed_test.sizes import Sizes, bus_bytes

if TYPE_CHECKING:
    from trainer.config.records.measured_hardware import Group, What
    from trainer.speed_test.clock import Clock


@dataclass(frozen=True)
class RankGroup:
    """A group of ranks that exchange messages at the same time as the other groups of this name.

    Attributes:
        name: of the group, as in the document.
        members: of this rank's own group; empty if this rank takes no part.
        group: of torch; None if this rank takes no part.
    """

    name: Group
    members: tuple[int, ...]
    group: dist.ProcessGroup | None


def group_members(firsts: Sequence[bool]) -> dict[Group, list[list[int]]]:
    """Name of a group -> the members of all groups of this name. Groups of the same ranks have the first name only.

    Args:
        firsts: True for each rank that is the first of its node, in order of rank.
    """
    starts = [rank for rank, is_first in enumerate(firsts) if is_first]
    nodes = [list(range(begin, end)) for begin, end in zip(starts, [*starts[1:], len(firsts)], strict=True)]
    candidates: Mapping[Group, list[list[int]]] = {
        "node": nodes,
        "one per node": [starts],
        "all": [list(range(len(firsts)))],
    }
    found: dict[Group, list[list[int]]] = {}
    for name, groups in candidates.items():
        if min(len(group) for group in groups) > 1 and groups not in found.values():
            found[name] = groups
    return found


def build_groups(firsts: Sequence[bool], rank: int) -> list[RankGroup]:
    """The groups of this rank. Collective: all ranks, since torch makes each group on all of them."""
    built = []
    for name, groups in group_members(firsts).items():
        own: tuple[tuple[int, ...], dist.ProcessGroup | None] = ((), None)
        for members in groups:
            made = dist.new_group(members)
            if rank in members:
                own = tuple(members), made
        built.append(RankGroup(name, *own))
    return built


def measure_messages(
    clock: Clock, groups: Sequence[RankGroup], sizes: Sizes, begin: Callable[..., None]
) -> Iterator[Sample]:
    """Measure the messages of all groups. Collective: all ranks.

    Args:
        clock: of this rank's device.
        groups: all groups.
        sizes: of the measurements.
        begin: is told kind and size of each step before it begins.
    """
    for group in groups:
        for what in _CALLS:
            for size in sizes.messages:
                begin(f"{what} in group {group.name!r}", f"{size} bytes")
                # Ranks that take no part wait, so that no message of theirs is on the wires.
                dist.barrier()
                if group.group is not None:
                    yield _message(clock, group, what, size)


def _message(clock: Clock, group: RankGroup, what: What, size: int) -> Sample:
    dtype, ranks = dtype_of(clock.device), len(group.members)
    # Whole parts for every rank.
    part = max(1, size // (ranks * dtype.itemsize))
    whole = torch.ones(part * ranks, device=clock.device, dtype=dtype)
    actual = whole.numel() * dtype.itemsize
    call = _CALLS[what](whole, part, group)
    timing = clock.time(call, lambda own: max_over_ranks([own], clock.device, group.group)[0])
    return Sample(
        what,
        name_of(dtype),
        bus_bytes(what, actual, ranks),
        timing.seconds,
        timing.repetitions,
        bytes=actual,
        group=group.name,
        ranks=ranks,
    )


def _all_reduce(whole: torch.Tensor, _part: int, group: RankGroup) -> Callable[[], object]:
    # Zeros, whose sums stay finite.
    whole.zero_()
    return lambda: dist.all_reduce(whole, group=group.group)


def _all_gather(whole: torch.Tensor, part: int, group: RankGroup) -> Callable[[], object]:
    own = torch.ones_like(whole[:part])
    return lambda: all_gather_single(whole, own, group=group.group)


def _reduce_scatter(whole: torch.Tensor, part: int, group: RankGroup) -> Callable[[], object]:
    own = torch.empty_like(whole[:part])
    return lambda: reduce_scatter_single(own, whole, group=group.group)


def _send(whole: torch.Tensor, _part: int, group: RankGroup) -> Callable[[], object]:
    received, place, size = torch.empty_like(whole), group.members.index(dist.get_rank()), len(group.members)
    after, before = group.members[(place + 1) % size], group.members[(place - 1) % size]

    def exchange() -> None:
        messages = [
            dist.P2POp(dist.isend, whole, after, group.group),
            dist.P2POp(dist.irecv, received, before, group.group),
        ]
        for message in dist.batch_isend_irecv(messages):
            message.wait()

    return exchange


_CALLS: Mapping[What, Callable[[torch.Tensor, int, RankGroup], Callable[[], object]]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "send": _send,
}

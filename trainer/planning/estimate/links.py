"""Seconds of messages, by the links that they cross. Torch-free.

A ring through several nodes uses the network adapters of all of its ranks: with 8 ranks on each node it is 8 times as
fast between nodes as with one. Latencies are those of NCCL's own model for its protocol LL128 (NVIDIA/nccl@5067397
src/graph/tuning.cc): a start, and a step for each further rank of a ring, or for each doubling of a tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import TYPE_CHECKING

from trainer.planning.estimate.devices import LINK_SHARE

if TYPE_CHECKING:
    from trainer.planning.estimate.devices import Device

_START = 14e-6
_STEP_WITHIN, _STEP_BETWEEN, _TREE_STEP = 1.9e-6, 4.0e-6, 8.5e-6


@dataclass(frozen=True)
class RankGroup:
    """Ranks of a collective.

    Attributes:
        size: number of ranks.
        near: of them on one node.
    """

    size: int
    near: int

    @property
    def nodes(self) -> int:
        """Nodes that have ranks of the group."""
        return ceil(self.size / self.near)


@dataclass(frozen=True)
class Links:
    """Links of a number of devices on each node."""

    per_node: int
    device: Device

    def group(self, *axes: tuple[int, int]) -> RankGroup:
        """Ranks that differ in ``axes``, each a number of ranks and the distance between neighbours."""
        size = near = 1
        for count, distance in axes:
            size *= count
            near *= min(count, max(1, self.per_node // distance))
        return RankGroup(size, min(near, self.per_node))

    def collective(self, sent: float, group: RankGroup) -> float:
        """Seconds of an all-gather or a reduce-scatter in which a rank sends ``sent`` bytes."""
        return self._latency(group) + sent / self._ring_speed(group)

    def all_reduce(self, sent: float, group: RankGroup) -> float:
        """Seconds of an all-reduce in which a rank sends ``sent`` bytes."""
        ring = 2 * self._latency(group)
        tree = _START + 2 * ((group.near - 1) * _STEP_WITHIN + log2(group.nodes) * _TREE_STEP)
        return min(ring, tree) + sent / self._ring_speed(group)

    def exchange(self, sent: float, group: RankGroup) -> float:
        """Seconds of an all-to-all in which a rank sends ``sent`` bytes to the others, through its own adapter."""
        others = group.size - 1
        between = sent * (group.size - group.near) / others / (self.device.between * LINK_SHARE)
        within = sent * (group.near - 1) / others / (self.device.within * LINK_SHARE)
        return _START + max(between, within)

    def message(self, sent: float, distance: int) -> float:
        """Seconds of a message of ``sent`` bytes to the rank ``distance`` ranks away."""
        leaves = distance >= self.per_node
        speed = self.device.between if leaves else self.device.within
        return _START + (_STEP_BETWEEN if leaves else _STEP_WITHIN) + sent / (speed * LINK_SHARE)

    def _latency(self, group: RankGroup) -> float:
        step = _TREE_STEP if group.near == 1 else _STEP_BETWEEN
        return _START + (group.size - group.nodes) * _STEP_WITHIN + (group.nodes - 1) * step

    def _ring_speed(self, group: RankGroup) -> float:
        device = self.device
        speed = device.within if group.nodes == 1 else min(device.within, group.near * device.between)
        return speed * LINK_SHARE

"""Greedy list scheduling of actions into a table, by simulation in ticks.

Such a table cannot deadlock, and exists for any number of micro-batches, where closed formulas need multiples of pp.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.planning.schedule.placement import Placement, ScheduleError
from trainer.planning.schedule.table import Action, ActionKind, ActivationBound, PipelineSchedule

Turn = tuple[int, int]
"""Micro-batch and model chunk."""


def arrange(
    placement: Placement,
    num_micro_batches: int,
    forwards: Sequence[Turn],
    backwards: Sequence[Turn],
    bounds: Sequence[ActivationBound],
    *,
    split: bool,
) -> PipelineSchedule:
    """Build a table: a free rank prefers forward, then backward, then weight gradients.

    Forwards first, as far as the bounds allow, keep the pipeline full: a rank at its bound needs a backward before the
    next forward, and so alternates between the two.

    All actions take one tick. The orders of forwards and of backwards are fixed and the same on all ranks.

    Args:
        placement: placement of the virtual stages.
        num_micro_batches: micro-batches of one replica per iteration.
        forwards: all forwards of a rank, in order.
        backwards: all backwards of a rank, in order.
        bounds: activation bounds of each rank; no forward starts on a rank at its bound.
        split: True if backward is two actions.

    Raises:
        ScheduleError: the bounds are too tight for these orders.
    """
    ranks = [_Rank(placement, rank, deque(forwards), deque(backwards), bounds[rank]) for rank in range(placement.pp)]
    done: set[tuple[ActionKind, int, int]] = set()  # kind, micro-batch, virtual stage
    total = placement.pp * (len(forwards) + len(backwards) * (2 if split else 1))
    while sum(len(rank.row) for rank in ranks) < total:
        # All ranks choose before any result counts: results of this tick can be used in the next one.
        actions = [rank.choose(done, split) for rank in ranks]
        if not any(actions):
            raise ScheduleError("no rank can start an action within these bounds")
        for rank, action in zip(ranks, actions, strict=True):
            if action is not None:
                rank.row.append(action)
                done.add((action.kind, action.micro_batch, placement.virtual_stage(rank.number, action.chunk)))
    return PipelineSchedule(num_micro_batches, tuple(tuple(rank.row) for rank in ranks), placement, tuple(bounds))


@dataclass
class _Rank:
    placement: Placement
    number: int
    forwards: deque[Turn]
    backwards: deque[Turn]
    bound: ActivationBound
    weights: deque[Turn] = field(default_factory=deque)
    live: int = 0
    row: list[Action] = field(default_factory=list)

    def choose(self, done: set[tuple[ActionKind, int, int]], split: bool) -> Action | None:
        """Take the preferred action that can start now; None: no action can start."""
        has_room = self.live < self.bound.live and self.live + len(self.weights) < self.bound.kept
        if self.forwards and has_room and self._forward_is_ready(*self.forwards[0], done):
            self.live += 1
            return Action(ActionKind.FORWARD, *self.forwards.popleft())
        if self.backwards and self._backward_is_ready(*self.backwards[0], done):
            self.live -= 1
            turn = self.backwards.popleft()
            if split:
                self.weights.append(turn)
            return Action(ActionKind.BACKWARD_INPUT if split else ActionKind.BACKWARD, *turn)
        if self.weights:
            return Action(ActionKind.BACKWARD_WEIGHT, *self.weights.popleft())
        return None

    def _forward_is_ready(self, micro_batch: int, chunk: int, done: set[tuple[ActionKind, int, int]]) -> bool:
        stage = self.placement.virtual_stage(self.number, chunk)
        return not stage or (ActionKind.FORWARD, micro_batch, stage - 1) in done

    def _backward_is_ready(self, micro_batch: int, chunk: int, done: set[tuple[ActionKind, int, int]]) -> bool:
        stage = self.placement.virtual_stage(self.number, chunk)
        if stage == self.placement.num_virtual_stages - 1:
            return (ActionKind.FORWARD, micro_batch, stage) in done
        return any((kind, micro_batch, stage + 1) in done for kind in ActionKind if kind.gives_input_gradient)

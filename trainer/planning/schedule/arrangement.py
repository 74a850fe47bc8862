"""Arranging actions into a table by simulation: every rank does, tick by tick, the best of what it can do.

A table made this way cannot wait for ever, and adapts to any number of micro-batches, where closed formulas want
multiples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.planning.schedule.placement import Placement, ScheduleError
from trainer.planning.schedule.table import Action, ActionKind, ActivationBound, PipelineSchedule

Turn = tuple[int, int]
"""Micro-batch and chunk."""


def arrange(
    placement: Placement,
    num_micro_batches: int,
    forwards: Sequence[Turn],
    backwards: Sequence[Turn],
    bounds: Sequence[ActivationBound],
    *,
    split: bool,
) -> PipelineSchedule:
    """A table in which every rank takes, whenever it is free, a forward before a backward before a weight gradient.

    A forward first, as far as the bounds allow, is what keeps the pipeline full: a rank at its bound needs a backward
    for the next forward, and so comes to one of each in turn.

    All actions take one tick. The order of the forwards and that of the backwards are the same on all ranks and fixed.

    Args:
        placement: of the virtual stages.
        num_micro_batches: of one replica in one iteration.
        forwards: all forwards of a rank, in order.
        backwards: all backwards of a rank, in order.
        bounds: of each rank; where one is reached, no forward starts.
        split: whether backward is two actions.

    Raises:
        ScheduleError: the bounds are too narrow for the orders.
    """
    ranks = [_Rank(placement, rank, deque(forwards), deque(backwards), bounds[rank]) for rank in range(placement.pp)]
    done: set[tuple[ActionKind, int, int]] = set()  # kind, micro-batch, virtual stage
    total = placement.pp * (len(forwards) + len(backwards) * (2 if split else 1))
    while sum(len(rank.row) for rank in ranks) < total:
        # Decided for all ranks before any result counts: what ends with this tick can be used in the next.
        actions = [rank.choose(done, split) for rank in ranks]
        if not any(actions):
            raise ScheduleError("no rank can start anything within these bounds")
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
        """Take the best action that can start now out of the waiting ones; None where there is none."""
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

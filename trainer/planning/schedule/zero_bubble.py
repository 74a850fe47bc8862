"""Zero-bubble schedules, which fill the bubble with delayed weight gradients.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241).
"""

from __future__ import annotations

from trainer.planning.schedule.arrangement import arrange
from trainer.planning.schedule.placement import Placement
from trainer.planning.schedule.table import Action, ActionKind, ActivationBound, PipelineSchedule


def zb_h1(pp: int, num_micro_batches: int) -> PipelineSchedule:
    """ZB-H1: 1F1B with weight gradients delayed into the bubble, in 1F1B's memory (section 2.3).

    Until the gradient of its input rank i holds ``pp - i`` activations, as in 1F1B. Until the gradients of the weights
    no rank keeps more than ``pp`` micro-batches, the number that 1F1B keeps on its first rank. Between the two a rank
    keeps different tensors: gradients of outputs, and with sequence parallelism the gathered inputs
    (trainer.pipeline.weight_gradients), which may need more memory than the activations. The bubble is
    ``(pp - 1) * (forward + backward_input - backward_weight)``, a third of 1F1B's if all three take the same time.
    """
    turns = [(micro_batch, 0) for micro_batch in range(num_micro_batches)]
    bounds = [ActivationBound(live=pp - rank, kept=pp) for rank in range(pp)]
    return arrange(Placement("one", pp), num_micro_batches, turns, turns, bounds, split=True)


def zb_v(pp: int, num_micro_batches: int) -> PipelineSchedule:
    """ZB-V: two model chunks per rank in a V.

    The bubble is almost zero, in 1F1B's memory (section 6).

    A rank keeps at most ``2 * pp`` activations of a chunk, each half as large as an activation of a rank in 1F1B. With
    at least ``2 * pp - 1`` micro-batches, and if forward and both backwards take the same time, no rank waits between
    its first and its last action.
    """
    # Fewer micro-batches do not fill the pattern: build the table for enough of them, and drop the surplus actions.
    enough = max(num_micro_batches, 2 * pp - 1)
    rows = (
        tuple(action for action in _VRow(pp, rank, enough).fill() if action.micro_batch < num_micro_batches)
        for rank in range(pp)
    )
    bounds = (ActivationBound(2 * pp, 2 * pp),) * pp
    return PipelineSchedule(num_micro_batches, tuple(rows), Placement("v", pp, 2), bounds)


class _VRow:
    """Builder of one rank's row of ZB-V.

    Counts the next micro-batch of each kind of action and chunk.
    """

    def __init__(self, pp: int, rank: int, num_micro_batches: int) -> None:
        self._pp = pp
        self._rank = rank
        self._num_micro_batches = num_micro_batches
        self._next = {(kind, chunk): 0 for kind in ActionKind for chunk in (0, 1)}
        self._row: list[Action] = []

    def fill(self) -> list[Action]:
        """Build the whole row.

        Warmup until the first micro-batch returns to this rank; then one forward and one backward of each chunk in
        turn; then the remaining input gradients, and the weight gradients delayed for them.
        """
        down, back = 0, 1
        self._forward(down, 2 * (self._pp - self._rank) - 1)
        for _ in range(self._rank):
            self._forward(back)
            self._forward(down)
        for _ in range(self._pp - self._rank):
            self._forward(back)
            self._backward(back)
        while self._next[ActionKind.FORWARD, back] < self._num_micro_batches:
            if self._next[ActionKind.FORWARD, down] < self._num_micro_batches:
                self._forward(down)
            self._backward(down)
            self._forward(back)
            self._backward(back)
        for _ in range(self._rank):
            self._add(ActionKind.BACKWARD_INPUT, down)
            self._add(ActionKind.BACKWARD_INPUT, back)
        for _ in range(self._pp - self._rank):
            self._add(ActionKind.BACKWARD_INPUT, down)
            self._add(ActionKind.BACKWARD_WEIGHT, down)
        for chunk in (back, down):
            while self._next[ActionKind.BACKWARD_WEIGHT, chunk] < self._num_micro_batches:
                self._add(ActionKind.BACKWARD_WEIGHT, chunk)
        return self._row

    def _forward(self, chunk: int, count: int = 1) -> None:
        for _ in range(count):
            self._add(ActionKind.FORWARD, chunk)

    def _backward(self, chunk: int) -> None:
        self._add(ActionKind.BACKWARD_INPUT, chunk)
        self._add(ActionKind.BACKWARD_WEIGHT, chunk)

    def _add(self, kind: ActionKind, chunk: int) -> None:
        self._row.append(Action(kind, self._next[kind, chunk], chunk))
        self._next[kind, chunk] += 1

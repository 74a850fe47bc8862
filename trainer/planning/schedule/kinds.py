"""Pipeline schedules with an undivided backward, and the schedule of evaluation, as pure functions."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from trainer.planning.schedule.arrangement import Turn, arrange
from trainer.planning.schedule.placement import Placement
from trainer.planning.schedule.table import Action, ActionKind, ActivationBound, PipelineSchedule


def gpipe(pp: int, num_micro_batches: int) -> PipelineSchedule:
    """GPipe: all forwards, then all backwards.

    Every rank keeps the activations of every micro-batch. The backwards run in the order of the forwards, so that
    gradients are summed in the same order in every schedule. Source: Huang et al. 2019, "GPipe: Efficient Training of
    Giant Neural Networks using Pipeline Parallelism" (arXiv:1811.06965), section 2.3.
    """
    row = tuple(Action(kind, i) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD) for i in range(num_micro_batches))
    bound = ActivationBound(num_micro_batches, num_micro_batches)
    return PipelineSchedule(num_micro_batches, (row,) * pp, Placement("one", pp), (bound,) * pp)


def one_f_one_b(pp: int, num_micro_batches: int) -> PipelineSchedule:
    """1F1B: alternate one forward and one backward, after a warmup that fills the pipeline.

    Rank i runs ``pp - i - 1`` forwards ahead, and so keeps the activations of at most ``pp - i`` micro-batches.
    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    section 2.2 (PipeDream-Flush).
    """

    def row(rank: int) -> tuple[Action, ...]:
        warmup = min(pp - rank - 1, num_micro_batches)
        actions = [Action(ActionKind.FORWARD, i) for i in range(warmup)]
        for i in range(num_micro_batches - warmup):
            actions += [Action(ActionKind.FORWARD, warmup + i), Action(ActionKind.BACKWARD, i)]
        actions += [Action(ActionKind.BACKWARD, i) for i in range(num_micro_batches - warmup, num_micro_batches)]
        return tuple(actions)

    bounds = tuple(ActivationBound(pp - rank, pp - rank) for rank in range(pp))
    return PipelineSchedule(num_micro_batches, tuple(map(row, range(pp))), Placement("one", pp), bounds)


def interleaved_one_f_one_b(pp: int, chunks: int, num_micro_batches: int) -> PipelineSchedule:
    """Interleaved 1F1B: several model chunks per rank, for a smaller bubble and more messages.

    Micro-batches run in groups: a group through the first chunk, then through the second, and so on. Rank i holds at
    most ``(chunks - 1) * g + 2 * (pp - 1 - i) + 1`` activations of a chunk, where g is the size of the largest group.
    Source: Narayanan et al. 2021, section 2.2, which only has groups of ``pp`` and numbers of micro-batches that are
    multiples of ``pp``. For other numbers the groups are larger here, so that the bubble stays
    ``(pp - 1) / (chunks * num_micro_batches)`` of the computation; a smaller last group would add 9% to the step on
    average of 2 to 8 ranks and up to 4 groups. The price is memory: ``2 * pp - 1`` micro-batches form one group. With
    fewer than ``pp`` micro-batches ranks wait for the only group.
    """
    placement = Placement("loop", pp, chunks)
    forwards = _in_groups(placement, num_micro_batches)
    backwards = [(micro_batch, chunks - 1 - chunk) for micro_batch, chunk in forwards]
    largest = max(pp, *_group_sizes(pp, num_micro_batches))
    most = [(chunks - 1) * largest + 2 * (pp - 1 - rank) + 1 for rank in range(pp)]
    bounds = [ActivationBound(count, count) for count in most]
    return arrange(placement, num_micro_batches, forwards, backwards, bounds, split=False)


@lru_cache(maxsize=32)
def all_forward(placement: Placement, num_micro_batches: int) -> PipelineSchedule:
    """Forward-only schedule of every micro-batch, for evaluation and generation."""
    turns = _in_groups(placement, num_micro_batches)
    nothing_is_kept = [ActivationBound(len(turns), len(turns))] * placement.pp
    return replace(arrange(placement, num_micro_batches, turns, (), nothing_is_kept, split=False), bounds=())


def _in_groups(placement: Placement, num_micro_batches: int) -> list[Turn]:
    """Order of forwards: each group of micro-batches through all chunks in turn."""
    sizes = _group_sizes(placement.pp, num_micro_batches)
    return [
        (micro_batch, chunk)
        for first, size in zip(accumulate(sizes, initial=0), sizes, strict=False)
        for chunk in range(placement.chunks)
        for micro_batch in range(first, first + size)
    ]


def _group_sizes(pp: int, num_micro_batches: int) -> list[int]:
    """Sizes of the most groups of at least ``pp`` micro-batches, nearly equal.

    Smaller ones leave ranks idle.
    """
    count = max(1, num_micro_batches // pp)
    size, rest = divmod(num_micro_batches, count)
    return [size + (number < rest) for number in range(count)]

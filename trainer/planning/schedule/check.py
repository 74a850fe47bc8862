"""Validation of a schedule table, before any tensor exists."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

from trainer.planning.schedule.placement import ScheduleError
from trainer.planning.schedule.simulation import (
    Meeting,
    batched_program,
    ordered_programs,
    run_programs,
    tagged_program,
)
from trainer.planning.schedule.table import (
    Action,
    ActionKind,
    PipelineSchedule,
    exchanges,
    kept_activations,
    live_activations,
)
from trainer.planning.schedule.timeline import timeline
from trainer.planning.schedule.traffic import TICKS, message_order

F, B, I, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT  # noqa: E741
_PARTS_OF_A_TURN = ({F, B}, {F, I, W})


def check(schedule: PipelineSchedule) -> None:
    """Refuse a table that is incomplete, disordered, over its bounds, or deadlocks.

    Messages are simulated as single sends and receives, matched by tags (gloo) or by their order (NCCL). Batched
    messages are more restrictive, and some valid tables cannot use them: see check_batches.

    Raises:
        ScheduleError: names the first problem.
    """
    if len(schedule.stages) != schedule.placement.pp:
        raise ScheduleError(f"{len(schedule.stages)} rows for a placement on {schedule.placement.pp} ranks")
    for rank in range(len(schedule.stages)):
        _check_row(schedule, rank)
        _check_hand_overs(schedule, rank)
        _check_bounds(schedule, rank)
    ranks = range(len(schedule.stages))
    run_programs([tagged_program(schedule, rank, sends_under_way=None) for rank in ranks], Meeting.BY_TAG)
    run_programs(ordered_programs(schedule), Meeting.BY_STREAM)


def check_batches(schedule: PipelineSchedule) -> None:
    """Refuse a table that cannot run with batched messages.

    All messages between two actions form a batch. A batch ends when all its messages have been matched, and messages
    between two ranks are matched in the order in which they are posted. If a rank receives activations and gradients
    from the same neighbour, as in interleaved 1F1B on two ranks, send and receive order can differ, and a gradient
    would be received as an activation.

    Raises:
        ScheduleError: messages would be mismatched or deadlock.
    """
    for (source, destination), (sent, wanted) in message_order(schedule).items():
        if sent != wanted:
            raise ScheduleError(f"rank {destination} receives in another order than rank {source} sends")
    run_programs([batched_program(schedule, rank) for rank in range(len(schedule.stages))], Meeting.BY_PAIR)


@lru_cache(maxsize=32)
def suits_batches(schedule: PipelineSchedule) -> bool:
    """True if batched messages match and cost no time.

    They cost time in ZB-H1: a batch with a single gradient blocks the weight gradients that should fill the bubble
    until the neighbour receives that gradient.
    """
    try:
        check_batches(schedule)
    except ScheduleError:
        return False
    programs = [batched_program(schedule, rank) for rank in range(len(schedule.stages))]
    return run_programs(programs, Meeting.BY_PAIR) == timeline(schedule, TICKS).step_time


def _check_row(schedule: PipelineSchedule, rank: int) -> None:
    actions = schedule.stages[rank]
    place = {action: step for step, action in enumerate(actions)}
    if len(place) != len(actions):
        twice = next(action for action in actions if actions.count(action) > 1)
        raise ScheduleError(f"rank {rank} runs {twice} more than once")
    kinds: dict[tuple[int, int], set[ActionKind]] = defaultdict(set)
    for action in actions:
        kinds[action.micro_batch, action.chunk].add(action.kind)
    turns = {
        (number, chunk) for number in range(schedule.num_micro_batches) for chunk in range(schedule.placement.chunks)
    }
    if stranger := next((action for action in actions if (action.micro_batch, action.chunk) not in turns), None):
        raise ScheduleError(f"rank {rank} runs {stranger}, which does not exist")
    # A table for evaluation has no backward.
    parts = _PARTS_OF_A_TURN if _is_for_training(schedule) else ({F},)
    for micro_batch, chunk in sorted(turns):
        if kinds[micro_batch, chunk] not in parts:
            what = "forward and backward" if _is_for_training(schedule) else "forward"
            raise ScheduleError(
                f"rank {rank} does not run micro-batch {micro_batch} of chunk {chunk} {what} exactly once"
            )
        for first, second in ((F, B), (F, I), (I, W)):
            earlier, later = Action(first, micro_batch, chunk), Action(second, micro_batch, chunk)
            if later in place and place[later] < place[earlier]:
                raise ScheduleError(f"rank {rank} runs {later} before {earlier}")


def _is_for_training(schedule: PipelineSchedule) -> bool:
    return any(action.kind is not F for row in schedule.stages for action in row)


def _check_bounds(schedule: PipelineSchedule, rank: int) -> None:
    if not schedule.bounds:
        return
    bound = schedule.bounds[rank]
    for count, most, until in (
        (live_activations(schedule, rank), bound.live, "gradient of the input"),
        (kept_activations(schedule, rank), bound.kept, "gradients of the weights"),
    ):
        if count > most:
            raise ScheduleError(f"rank {rank} holds {count} activations until the {until}, over its bound of {most}")


def _check_hand_overs(schedule: PipelineSchedule, rank: int) -> None:
    """Refuse a row that receives a local message before sending it."""
    row = exchanges(schedule, rank)
    given = {exchange.send: step for step, exchange in enumerate(row) if exchange.send and exchange.send.is_local}
    for step, exchange in enumerate(row):
        if exchange.receive in given and given[exchange.receive] > step:
            giver = row[given[exchange.receive]].action
            raise ScheduleError(f"rank {rank} runs {exchange.action} before {giver}, which it waits for")

"""Invalid schedule tables are refused, each with its message, before any tensor exists."""

import pytest

from trainer.planning.schedule import (
    Action,
    ActionKind,
    ActivationBound,
    PipelineSchedule,
    ScheduleError,
    check,
    check_batches,
    exchanges,
    timeline,
)
from trainer.planning.schedule.arrangement import arrange
from trainer.planning.schedule.placement import Placement
from trainer.planning.schedule.simulation import Call, Meeting, Verb, run_programs, tagged_program

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


def action(cell):
    number, _, chunk = cell[1:].partition(".")
    return Action(ActionKind(cell[0]), int(number), int(chunk or 0))


def table(count, *rows, bounds=(), placement=None):
    stages = tuple(tuple(action(cell) for cell in row.split()) for row in rows)
    return PipelineSchedule(count, stages, placement or Placement("one", len(rows)), bounds)


def bounds_1f1b(pp):
    return tuple(ActivationBound(pp - rank, pp - rank) for rank in range(pp))


V = Placement("v", 1, 2)


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        (table(1, "B0 F0", "F0 B0"), "rank 0 runs B0 before F0"),
        (table(1, "F0 W0 I0", "F0 I0 W0"), "rank 0 runs W0 before I0"),
        (table(1, "F0 I0 W0", "I0 F0 W0"), "rank 1 runs I0 before F0"),
        (table(2, "F0 F1 B0 B1", "F0 B0 F1"), "rank 1 does not run micro-batch 1 of chunk 0 forward and backward"),
        (table(2, "F0 F1 B0 B0", "F0 B0 F1 B1"), "rank 0 runs B0 more than once"),
        (table(1, "F0 B0 W0", "F0 B0"), "rank 0 does not run micro-batch 0 of chunk 0 forward and backward"),
        (table(1, "F0 I0", "F0 B0"), "rank 0 does not run micro-batch 0 of chunk 0 forward and backward"),
        (table(1, "F0 F1 B0", "F0 B0"), "rank 0 runs F1, which does not exist"),
        (table(1, "F0 F0.1 B0 B0.1", "F0 B0"), "rank 0 runs F0.1, which does not exist"),
        (table(1, "F0 B0", placement=V), "rank 0 does not run micro-batch 0 of chunk 1"),
        (table(2, "F0 F1", "F0"), "rank 1 does not run micro-batch 1 of chunk 0 forward exactly once"),
        (table(1, "F0 B0", placement=Placement("one", 2)), "1 rows for a placement on 2 ranks"),
        (
            table(2, "F0 B0 F1 B1", "F0 F1 B0 B1", bounds=bounds_1f1b(2)),
            "rank 1 holds 2 activations until the gradient of the input, over its bound of 1",
        ),
        (
            table(2, "F0 I0 F1 I1 W0 W1", bounds=(ActivationBound(1, 1),)),
            "rank 0 holds 2 activations until the gradients of the weights, over its bound of 1",
        ),
        # Rank 0 receives B0 before it sends F1, rank 1 receives F1 before it sends B0.
        (table(2, "F0 B0 F1 B1", "F0 F1 B0 B1"), "deadlock: rank 0 waits forever for B0 for virtual stage 0"),
        # The first chunk of a V waits for a later message of the second.
        (table(1, "F0.1 F0 B0.1 B0", placement=V), "rank 0 runs F0.1 before F0, which it waits for"),
    ],
)
def test_wrong_tables_are_refused(schedule, problem):
    with pytest.raises(ScheduleError, match=problem):
        check(schedule)


def test_the_same_actions_in_a_valid_order_are_accepted():
    """The same actions in a valid order are accepted."""
    check(table(2, "F0 F1 B0 B1", "F0 B0 F1 B1", bounds=bounds_1f1b(2)))
    check(table(1, "F0 F0.1 B0.1 B0", placement=V))
    check(table(2, "F0 F1", "F0 F1"))
    check(table(1, "F0 I0 W0", "F0 B0"))


def test_batches_in_another_order_are_refused_where_tags_would_do():
    schedule = table(2, "F0 F1 B0 B1", "F1 B1 F0 B0")
    check(schedule)
    with pytest.raises(ScheduleError, match="rank 1 receives in another order than rank 0 sends"):
        check_batches(schedule)


def test_batches_that_wait_for_each_other_are_refused():
    """Two batches wait for each other's messages.

    Rank 1 posts its receive of F1 with the send of B0's gradient, but rank 0 sends F1 before it receives B0.
    """
    schedule = table(3, "F0 F1 F2 B0 B1 B2", "F0 B0 F1 B1 F2 B2")
    check(schedule)
    check_batches(schedule)
    with pytest.raises(ScheduleError, match="deadlock: rank"):
        check_batches(table(2, "F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1", "F0 F1 B0 B1"))


def test_too_few_pending_sends_are_detected():
    """Rank 0 runs ahead of the receives of rank 1, which waits for F3."""
    schedule = table(4, "F0 F1 F2 F3 B3 B2 B1 B0", "F3 B3 F2 B2 F1 B1 F0 B0")
    check(schedule)
    programs = [tagged_program(schedule, rank, sends_under_way=1) for rank in range(2)]
    with pytest.raises(ScheduleError, match="deadlock"):
        run_programs(programs, Meeting.BY_TAG)


def test_a_message_mistaken_for_another_is_detected():
    message = next(e.send for e in exchanges_of(table(2, "F0 F1 B0 B1", "F0 B0 F1 B1")) if e.send)
    other = next(e.send for e in exchanges_of(table(2, "F1 F0 B1 B0", "F1 B1 F0 B0")) if e.send)
    programs = [[Call(Verb.SEND, message), Call(Verb.WAIT, message)], [Call(Verb.RECEIVE, other)]]
    with pytest.raises(ScheduleError, match="F0 for virtual stage 1 .* is sent where F1 .* is received"):
        run_programs(programs, Meeting.BY_PAIR)


def exchanges_of(schedule):
    return exchanges(schedule, 0)


def test_timeline_refuses_a_deadlock():
    with pytest.raises(ScheduleError, match="rank 0 never receives the message for B0"):
        timeline(table(2, "F0 B0 F1 B1", "F0 F1 B0 B1"), {F: 1.0, B: 2.0})


def test_bounds_too_narrow_for_the_order_are_refused():
    """A V needs bounds for two live activations, for both forwards."""
    with pytest.raises(ScheduleError, match="no rank can start an action within these bounds"):
        arrange(V, 1, [(0, 0), (0, 1)], [(0, 1), (0, 0)], [ActivationBound(1, 1)], split=False)

"""Pipeline schedules checked as data, before any tensor exists."""

import subprocess
import sys

import pytest

from trainer.pipeline.schedule import (
    Action,
    ActionKind,
    PipelineSchedule,
    ScheduleError,
    all_forward,
    check,
    exchanges,
    live_activations,
    one_f_one_b,
    timeline,
)
from trainer.pipeline.stage import layers_of_stage

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


def table(num_micro_batches: int, *rows: str) -> PipelineSchedule:
    stages = (tuple(Action(ActionKind(cell[0]), int(cell[1:])) for cell in row.split()) for row in rows)
    return PipelineSchedule(num_micro_batches, tuple(stages))


def test_one_f_one_b_as_drawn_in_the_paper():
    assert str(one_f_one_b(4, 5)) == "\n".join(
        (
            "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4",
            "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
            "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
            "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
        )
    )


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 4, 7, 8, 9, 33])
def test_one_f_one_b_can_run(pp, num_micro_batches):
    schedule = one_f_one_b(pp, num_micro_batches)
    check(schedule)
    for stage in range(pp):
        assert live_activations(schedule, stage) == min(pp - stage, num_micro_batches)


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("num_micro_batches", [1, 4, 16])
def test_bubble_is_that_of_the_paper(pp, num_micro_batches):
    """Narayanan et al. 2021, section 2.2: idle time (p - 1) (tf + tb) beside m (tf + tb) of work."""
    times = timeline(one_f_one_b(pp, num_micro_batches), {F: 1.0, B: 2.0})
    assert max(row[-1][1] for row in times) == (pp - 1 + num_micro_batches) * 3.0


def test_forward_only_table_streams():
    times = timeline(all_forward(3, 5), {F: 1.0})
    assert times[2][-1][1] == 7.0
    assert [exchange.receive for exchange in exchanges(all_forward(3, 5), 0)] == [None] * 5


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        (table(1, "B0 F0", "F0 B0"), "stage 0 runs B0 before F0"),
        (table(2, "F0 F1 B0 B1", "F0 B0 F1"), "stage 1 does not run every micro-batch"),
        (table(2, "F0 F1 B0 B0", "F0 B0 F1 B1"), "stage 0 does not run every micro-batch"),
        (table(2, "F0 F1 B0 B1", "F1 B1 F0 B0"), "in another order"),
        (table(2, "F0 B0 F1 B1", "F0 F1 B0 B1"), "stage 1 holds 2 micro-batches, over 1"),
        (table(3, "F0 F1 F2 B0 B1 B2", "F0 B0 F1 B1 F2 B2"), "stage 0 holds 3 micro-batches, over 2"),
        # Stage 0 wants B0 before it gives F1, stage 1 wants F1 before it gives B0; stage 2 gives its memory for it.
        (table(2, "F0 B0 F1 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"), "deadlock: stage"),
    ],
)
def test_wrong_tables_are_refused(schedule, problem):
    with pytest.raises(ScheduleError, match=problem):
        check(schedule)


def test_timeline_refuses_a_deadlock():
    with pytest.raises(ScheduleError, match="never gets what"):
        timeline(table(2, "F0 B0 F1 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"), {F: 1.0, B: 2.0})


def test_layers_are_divided_evenly_and_without_rest():
    assert [list(layers_of_stage(6, 3, stage)) for stage in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="30 layers cannot be divided evenly over 4"):
        layers_of_stage(30, 4, 0)
    with pytest.raises(ValueError, match="no stage 3 among 3"):
        layers_of_stage(6, 3, 3)


def test_schedules_need_no_torch():
    program = "import sys, trainer.pipeline.schedule, trainer.pipeline.stage; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

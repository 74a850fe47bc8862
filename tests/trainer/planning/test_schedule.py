"""Pipeline schedule tables: their published costs, and validity at any size."""

import subprocess
import sys

import pytest

from tests.waiting import HANG_S
from trainer.planning.schedule import (
    SCHEDULE_KINDS,
    ActionKind,
    Message,
    ScheduleError,
    all_forward,
    build_schedule,
    check,
    check_batches,
    default_chunks,
    exchanges,
    interleaved_one_f_one_b,
    kept_activations,
    live_activations,
    message_count,
    one_f_one_b,
    placement_of,
    sends_under_way,
    suits_batches,
    timeline,
    zb_h1,
    zb_v,
)
from trainer.planning.schedule.placement import Placement
from trainer.planning.schedule.simulation import Meeting, ordered_programs, run_programs, tagged_program
from trainer.planning.schedule.traffic import message_order, posts_in_order

F, B, I, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT  # noqa: E741
EQUAL = {F: 1.0, I: 1.0, W: 1.0}
MICRO_BATCHES = range(1, 18)


def chunks_of(kind):
    return (2, 3, 4) if kind == "interleaved" else (default_chunks(kind),)


VARIANTS = [(kind, chunks) for kind in SCHEDULE_KINDS for chunks in chunks_of(kind)]


def counts_around(pp):
    """Numbers of micro-batches at which warm-up, groups and rest of a schedule change."""
    return sorted({1, 2, *(waves * pp + more for waves in (1, 2) for more in (-1, 0, 1))} - {0})


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("kind", "chunks"), [(kind, chunks) for kind, chunks in VARIANTS if chunks < 4])
def test_every_schedule_can_run_where_its_phases_change(kind, chunks, pp):
    require_valid(kind, chunks, pp, counts_around(pp))


@pytest.mark.proof
@pytest.mark.parametrize("pp", range(1, 9))
@pytest.mark.parametrize(("kind", "chunks"), VARIANTS)
def test_every_schedule_can_run_at_any_size(kind, chunks, pp):
    require_valid(kind, chunks, pp, MICRO_BATCHES)


def require_valid(kind, chunks, pp, counts):
    """Tables are complete, ordered and within bounds; single messages always match, batches where required."""
    for count in counts:
        schedule = build_schedule(kind, pp, chunks, count)
        assert schedule.placement == placement_of(kind, pp, chunks)
        check(schedule)
        if kind in ("gpipe", "1f1b", "zb-h1"):
            check_batches(schedule)
        for sent, wanted in message_order(schedule).values():
            assert len(sent) == len(set(sent))
            assert set(sent) == set(wanted)
        virtual_stages = pp * chunks
        local = {"zb-v": 1}.get(kind, 0) if pp > 1 else virtual_stages - 1
        assert message_count(schedule) == 2 * count * (virtual_stages - 1 - local)
        # Every schedule sums the gradients of a chunk in the order of a single process.
        for row in schedule.stages:
            for chunk in range(chunks):
                for last in (B, W):
                    numbers = [a.micro_batch for a in row if a.kind is last and a.chunk == chunk]
                    assert numbers == sorted(numbers)


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("kind", ["one", "loop", "v"])
def test_evaluation_can_run_over_every_placement(kind, pp):
    for chunks in {"one": (1,), "loop": (1, 2, 3), "v": (2,)}[kind]:
        for count in (1, 2, 5, 8, 9):
            schedule = all_forward(Placement(kind, pp, chunks), count)
            check(schedule)
            assert all(action.kind is F for row in schedule.stages for action in row)


def test_one_f_one_b_as_drawn_in_the_paper():
    assert str(one_f_one_b(4, 5)) == "\n".join(
        (
            "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4",
            "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
            "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
            "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
        )
    )


def test_zb_h1_fills_the_bubble_at_the_end_with_weight_gradients():
    assert str(zb_h1(3, 4)) == "\n".join(
        (
            "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
            "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
            "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
        )
    )


def test_the_last_rank_of_a_v_passes_outputs_to_itself():
    row = exchanges(zb_v(2, 1), 1)
    assert [str(exchange.action) for exchange in row] == ["F0", "F0.1", "I0.1", "W0.1", "I0", "W0"]
    turn = row[0].send
    assert turn is not None
    assert turn.is_local
    assert row[1].receive == turn
    assert row[2].send == row[4].receive
    assert row[4].send is not None
    assert (row[4].send.kind, row[4].send.source, row[4].send.destination) == (B, 1, 0)
    assert (row[3].receive, row[3].send) == (None, None)


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", MICRO_BATCHES)
def test_activations_are_within_the_bounds_of_the_schedules(pp, count):
    for rank in range(pp):
        assert live_activations(build_schedule("gpipe", pp, 1, count), rank) == count
        assert live_activations(one_f_one_b(pp, count), rank) == min(pp - rank, count)
        assert live_activations(zb_h1(pp, count), rank) == min(pp - rank, count)
        assert kept_activations(zb_h1(pp, count), rank) <= min(pp, count)
        # A chunk is half a stage: never more than the first rank of 1F1B.
        assert kept_activations(zb_v(pp, count), rank) <= min(2 * pp, 2 * count)
        for chunks in (2, 3):
            # Size of the largest of nearly equal groups of pp or more.
            group = max(pp, -(-count // max(1, count // pp)))
            most = (chunks - 1) * group + 2 * (pp - 1 - rank) + 1
            assert live_activations(interleaved_one_f_one_b(pp, chunks, count), rank) <= min(most, chunks * count)


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 4, 16])
def test_bubble_of_1f1b_is_that_of_the_paper(pp, count):
    """Idle time (p - 1) (tf + tb) for m (tf + tb) of work.

    Source: Narayanan et al. 2021, section 2.2.
    """
    for kind in ("1f1b", "gpipe"):
        times = timeline(build_schedule(kind, pp, 1, count), {F: 1.0, B: 2.0})
        assert times.step_time == (pp - 1 + count) * 3.0
        assert times.bubble_fraction == pytest.approx((pp - 1) / (pp - 1 + count))


@pytest.mark.parametrize("pp", range(2, 9))
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_bubble_of_interleaved_is_divided_by_the_chunks(pp, chunks):
    """Narayanan et al. 2021, section 2.2, for any number of micro-batches."""
    for count in (pp, pp + 1, 2 * pp - 1, 2 * pp, 2 * pp + 1, 4 * pp - 1):
        step_time = timeline(interleaved_one_f_one_b(pp, chunks, count), {F: 1, B: 2}).step_time
        assert step_time == 3 * chunks * count + 3 * (pp - 1), count


def test_actions_of_one_kind_may_differ_in_time():
    schedule = one_f_one_b(2, 3)
    times = timeline(schedule, lambda _rank, action: 1.0 + action.micro_batch)
    assert [end - start for start, end in times.rows[0]] == [1.0 + action.micro_batch for action in schedule.stages[0]]


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("kind", "chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 5), ("zb-h1", 1), ("zb-v", 2)]
)
def test_more_than_two_micro_batches_per_stage_keep_no_more(kind, chunks, pp):
    """The memory of a long table is planned by a short one."""
    short = build_schedule(kind, pp, chunks, 2 * pp)
    for count in (3 * pp, 5 * pp) if kind == "interleaved" else (2 * pp + 1, 4 * pp - 1, 5 * pp):
        long = build_schedule(kind, pp, chunks, count)
        for rank in range(pp):
            assert kept_activations(long, rank) == kept_activations(short, rank)


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
def test_bubbles_of_the_zero_bubble_schedules(pp):
    """Qi et al. 2023: (p - 1) (tf + ti - tw) for ZB-H1.

    For ZB-V no rank waits between its first and last action.
    """
    for count in range(pp, 3 * pp):
        assert timeline(zb_h1(pp, count), EQUAL).step_time == 3.0 * count + pp - 1
    durations = {F: 1.0, I: 1.2, W: 0.8}
    for count in range(2 * pp, 4 * pp):
        assert timeline(zb_h1(pp, count), durations).step_time == pytest.approx(3.0 * count + (pp - 1) * 1.4)
    for count in range(2 * pp - 1, 4 * pp):
        times = timeline(zb_v(pp, count), EQUAL)
        assert times.step_time == 6.0 * count + pp - 1
        assert all(row[-1][1] - row[0][0] == 6.0 * count for row in times.rows)


def test_timeline_includes_virtual_stages_and_messages():
    schedule = one_f_one_b(2, 1)
    # F on rank 0, message, F and B on rank 1, message, B on rank 0.
    assert timeline(schedule, {F: 1.0, I: 1.0, W: 1.0}, latency=0.25).step_time == 1 + 0.25 + 1 + 2 + 0.25 + 2
    slow_head = [{F: 1.0, B: 2.0}, {F: 3.0, B: 5.0}]
    assert timeline(schedule, slow_head).step_time == 1 + 3 + 5 + 2
    assert timeline(schedule, slow_head).idle_time(0) == 8
    # A V on a single rank: no message is sent.
    assert timeline(zb_v(1, 2), EQUAL, latency=9.0).step_time == 12.0


def test_forward_only_tables_stream():
    assert timeline(all_forward(Placement("one", 3), 5), {F: 1.0}).step_time == 7.0
    assert timeline(all_forward(Placement("loop", 2, 2), 4), {F: 1.0}).step_time == 9.0


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(
    ("count", "problem"), [(4, "deadlock"), (5, "another order"), (8, "deadlock"), (9, "another order")]
)
def test_batches_of_interleaved_on_two_ranks_are_refused(chunks, count, problem):
    """A gradient would be received as an activation: both neighbours are the same rank."""
    schedule = interleaved_one_f_one_b(2, chunks, count)
    check(schedule)
    with pytest.raises(ScheduleError, match=problem):
        check_batches(schedule)


def test_batches_are_used_if_they_match_and_cost_no_time():
    assert suits_batches(one_f_one_b(4, 8))
    assert suits_batches(build_schedule("gpipe", 4, 1, 8))
    assert suits_batches(all_forward(Placement("one", 4), 8))
    # The batches match, but delay weight gradients.
    check_batches(zb_h1(4, 8))
    assert not suits_batches(zb_h1(4, 8))
    # The batches would deadlock.
    assert not suits_batches(zb_v(4, 8))
    assert not suits_batches(interleaved_one_f_one_b(4, 2, 8))


@pytest.mark.parametrize(("kind", "chunks"), VARIANTS)
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_no_way_of_sending_costs_time(kind, chunks, pp):
    """No rank waits for a message longer than the table requires."""
    durations = {F: 1, B: 2, I: 1, W: 1}
    for count in (1, 3, 8, 13):
        schedule = build_schedule(kind, pp, chunks, count)
        ideal = timeline(schedule, durations).step_time
        most = sends_under_way(schedule)
        tagged = [tagged_program(schedule, rank, sends_under_way=most) for rank in range(pp)]
        assert run_programs(tagged, Meeting.BY_TAG) == ideal
        assert run_programs(ordered_programs(schedule), Meeting.BY_STREAM) == ideal


def test_few_sends_are_pending():
    """Each pending send keeps an output in memory.

    ZB-V's first rank runs further ahead of its neighbour.
    """
    for count in (1, 4, 8, 16):
        assert [sends_under_way(build_schedule(kind, 4, 1, count)) for kind in ("gpipe", "1f1b", "zb-h1")] == [2] * 3
        assert sends_under_way(all_forward(Placement("one", 4), count)) == 2
    assert sends_under_way(zb_v(4, 8)) == 4


def test_as_many_sends_are_pending_as_avoid_waiting():
    """With one pending send less, some rank of ZB-V would wait."""
    for pp in (4, 5, 8):
        schedule = zb_v(pp, 2 * pp)
        best, most = timeline(schedule, {F: 1, I: 1, W: 1}).step_time, sends_under_way(schedule)
        fewer, enough = (
            [tagged_program(schedule, rank, sends_under_way=number) for rank in range(pp)]
            for number in (most - 1, most)
        )
        assert run_programs(fewer, Meeting.BY_TAG) > best == run_programs(enough, Meeting.BY_TAG)


def test_pending_sends_are_counted_without_running_the_table(monkeypatch):
    """The simulation of a table of a hundred thousand actions takes seconds."""
    monkeypatch.setattr("trainer.planning.schedule.simulation.run_programs", None)
    sends_under_way.cache_clear()
    assert sends_under_way(interleaved_one_f_one_b(4, 2, 16)) == 2


def test_the_order_of_posts_takes_time_in_proportion_to_the_messages(monkeypatch):
    """The test counts comparisons.

    A search per message would take half a minute for thousands of messages.
    """
    compared, compare = 0, Message.__eq__

    def counting(one, other):
        nonlocal compared
        compared += 1
        return compare(one, other)

    schedule = interleaved_one_f_one_b(4, 4, 64)
    posts_in_order.cache_clear()
    monkeypatch.setattr(Message, "__eq__", counting)
    posts = posts_in_order(schedule)
    monkeypatch.undo()
    count = message_count(schedule)
    assert sum(len(step) for row in posts for step in row) == 2 * count
    assert compared < 20 * count


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("2f2b", 2, 1, 4), "unknown pipeline schedule '2f2b'; use one of gpipe, 1f1b, interleaved, zb-h1, zb-v"),
        (("1f1b", 0, 1, 4), "at least one rank, not 0"),
        (("1f1b", 2, 2, 4), "1f1b needs one chunk per rank, not 2"),
        (("zb-v", 2, 3, 4), "zb-v needs two chunks per rank, not 3"),
        (("interleaved", 2, 1, 4), "interleaved needs two or more chunks per rank, not 1"),
        (("zb-h1", 2, 1, 0), "at least one micro-batch, not 0"),
    ],
)
def test_unknown_schedules_and_impossible_sizes_are_refused(arguments, problem):
    with pytest.raises(ScheduleError, match=problem):
        build_schedule(*arguments)


@pytest.mark.parametrize("pp", [1, 2, 5])
def test_placements_are_one_to_one(pp):
    for placement in (Placement("one", pp), Placement("loop", pp, 3), Placement("v", pp, 2)):
        places = [placement.place(stage) for stage in range(placement.num_virtual_stages)]
        assert len(set(places)) == pp * placement.chunks
        assert [placement.virtual_stage(*place) for place in places] == list(range(placement.num_virtual_stages))
    assert Placement("v", pp, 2).place(2 * pp - 1) == (0, 1)
    assert Placement("loop", pp, 3).place(2 * pp) == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [(("one", 2, 2), "one chunk"), (("v", 2, 1), "two chunks"), (("loop", 0, 1), "at least one rank")],
)
def test_wrong_placements_are_refused(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        Placement(*arguments)


def test_schedules_need_no_torch():
    program = (
        "import sys, trainer.planning.schedule, trainer.planning.schedule.placement; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANG_S)

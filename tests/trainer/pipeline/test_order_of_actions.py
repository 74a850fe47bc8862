"""Ranks perform the table's actions in the table's order, and wait only for messages.

benchmarks/pipeline_efficiency.py has the step times: they depend on what else the machine does.
"""

import itertools
import math

import pytest
import torch
import torch.distributed as dist

from benchmarks.pipeline_efficiency import computing_steps
from tests.trainer.pipeline.test_communication import peers_of
from tests.waiting import wait_for
from trainer.pipeline.executor import run_row
from trainer.planning.schedule import (
    SCHEDULE_KINDS,
    ActionKind,
    build_schedule,
    default_chunks,
    exchanges,
    message_count,
    sends_under_way,
    timeline,
)


@pytest.mark.parametrize("kind", SCHEDULE_KINDS)
def test_ranks_compute_the_rows_of_the_table(ranks, kind):
    (step,) = computing_steps(ranks, 2, kind, 4, 1)
    assert [tuple(action for action, _, _ in row) for row in step.rows] == list(step.schedule.stages)
    assert step.messages == message_count(step.schedule)


def independent_actions(schedule, late):
    """Actions of each rank that must begin although rank ``late`` has not.

    They need no message from it, directly or through others. Sends to it do not arrive, and only so many may be under
    way: the actions behind them are left out.
    """
    times, most = timeline(schedule, lambda rank, _: math.inf if rank == late else 0.0), sends_under_way(schedule)
    independent = []
    for rank, row in enumerate(times.rows):
        exchanged = exchanges(schedule, rank)
        sent = itertools.accumulate((exchange.send is not None for exchange in exchanged), initial=0)
        independent.append(
            {
                exchange.action
                for exchange, before, (_, end) in zip(exchanged, sent, row, strict=False)
                if end < math.inf and before <= most
            }
        )
    return independent


def run_with_a_late_rank(rank, world_size, kind, count, late):
    """Run the table while rank ``late`` waits until all actions that do not need it have begun."""
    schedule = build_schedule(kind, world_size, default_chunks(kind), count)
    peers, store = peers_of(rank, world_size, count), dist.distributed_c10d._get_default_store()
    independent = independent_actions(schedule, late)
    expected, began = sum(map(len, independent)), []

    def perform(action, _incoming):
        if not began and rank == late:
            wait_for(
                lambda: store.add("begun", 0) == expected, lambda: f"{store.add('begun', 0)} of {expected} actions"
            )
        began.append(action)
        if action in independent[rank]:
            store.add("begun", 1)
        return None if action.kind is ActionKind.BACKWARD_WEIGHT else torch.ones(3, 5)

    run_row(schedule, rank, peers, perform)
    return tuple(began)


@pytest.mark.parametrize("late", range(4))
@pytest.mark.parametrize("kind", SCHEDULE_KINDS)
def test_a_late_rank_holds_up_only_what_needs_it(ranks, kind, late):
    """A rank that waited for its sends to arrive would never begin its next action."""
    schedule = build_schedule(kind, 4, default_chunks(kind), 8)
    assert ranks.run(run_with_a_late_rank, kind, 8, late) == list(schedule.stages)

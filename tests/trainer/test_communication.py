"""Messages between stages: each arrives where the table wants it, both ways of sending, without piling up."""

import random
import time
from datetime import timedelta

import pytest
import torch

from tests.trainer.spawn import DEADLINE_S, Ranks
from trainer.mesh import ParallelMesh, build_process_groups
from trainer.pipeline.communication import BatchedMessenger, TaggedMessenger, Wire, build_messenger
from trainer.pipeline.schedule import ActionKind, all_forward, exchanges, one_f_one_b


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as ranks:
        yield ranks


def run_table(rank, world_size, messenger_class, build_schedule, count):
    """Every action passes on what it got plus one, after working for a while; returns what arrived."""
    mesh = ParallelMesh(tp=1, pp=world_size, dp=1, rank=rank)
    group = build_process_groups(mesh, timedelta(seconds=DEADLINE_S)).pp
    wire = Wire(group, mesh.pp_ranks, (3, 5), torch.float32, torch.device("cpu"))
    row = exchanges(build_schedule(world_size, count), rank)
    arrived, outgoing, most = {}, None, 0
    for _ in range(2):
        messenger = messenger_class(wire, row)
        for step, exchange in enumerate(row):
            incoming = messenger.exchange(step, outgoing)
            assert (incoming is None) == (exchange.receive is None)
            time.sleep(random.Random(f"{rank} {step}").random() * 2e-3)
            kind, number = exchange.action.kind.value, exchange.action.micro_batch
            outgoing = torch.full((3, 5), 100.0 * number) if incoming is None else incoming + 1
            assert (outgoing == outgoing[0, 0]).all()
            arrived[kind, number] = float(outgoing[0, 0])
            # A view that is not contiguous must arrive as what it shows.
            outgoing = outgoing.t().contiguous().t()
            most = max(most, len(getattr(messenger, "_leaving", ())))
        messenger.finish(outgoing)
        outgoing = None
        assert not getattr(messenger, "_leaving", ())
        assert not getattr(messenger, "_arriving", ())
    return arrived, most


@pytest.mark.parametrize("messenger_class", [TaggedMessenger, BatchedMessenger])
@pytest.mark.parametrize("build_schedule", [one_f_one_b, all_forward])
@pytest.mark.parametrize(("pp", "count"), [(2, 1), (2, 5), (3, 4), (4, 2), (4, 4), (4, 20)])
def test_messages_arrive_as_the_table_says(ranks, messenger_class, build_schedule, pp, count):
    results = ranks.run(run_table, messenger_class, build_schedule, count, world_size=pp)
    for rank, (arrived, most) in enumerate(results):
        assert most <= 2
        for (kind, number), value in arrived.items():
            distance = rank if kind == ActionKind.FORWARD.value else pp - 1 - rank
            assert value == 100.0 * number + distance


def test_a_pipeline_of_one_stage_has_no_messages():
    messenger = build_messenger(None, exchanges(one_f_one_b(1, 2), 0))
    assert messenger.exchange(0, None) is None
    messenger.finish(torch.ones(1))

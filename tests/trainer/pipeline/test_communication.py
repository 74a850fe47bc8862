"""Messages between ranks arrive in every mode, without piling up."""

import random
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.trainer.spawn import DEADLINE_S
from trainer.distributed.mesh import ParallelMesh, build_process_groups
from trainer.pipeline.communication import (
    BatchedCommunicator,
    OrderedCommunicator,
    PipelinePeers,
    StageCommunicator,
    TaggedCommunicator,
    build_communicator,
)
from trainer.planning.schedule import (
    ActionKind,
    all_forward,
    build_schedule,
    default_chunks,
    exchanges,
    message_count,
    one_f_one_b,
    sends_under_way,
    zb_v,
)
from trainer.planning.schedule.placement import Placement


def tagged(peers, schedule, rank):
    return TaggedCommunicator(peers, schedule, rank, sends_under_way(schedule))


def table(kind, pp, count):
    if kind.startswith("evaluate"):
        placement = kind.split()[1]
        return all_forward(Placement(placement, pp, 1 if placement == "one" else 2), count)
    return build_schedule(kind, pp, default_chunks(kind), count)


def peers_of(rank, world_size, count):
    mesh = ParallelMesh(tp=1, pp=world_size, dp=1, rank=rank)
    group = build_process_groups(mesh, timedelta(seconds=DEADLINE_S)).pp
    return PipelinePeers(group, group, mesh.pp_ranks, [(3, 5)] * count, torch.float32, torch.device("cpu"))


def run_table(rank, world_size, build, kind, count):
    """Run a table whose actions return their input plus one, after some work.

    Returns the received values and the sends.
    """
    peers, schedule = peers_of(rank, world_size, count), table(kind, world_size, count)
    arrived, outgoing, most, sends = {}, None, 0, []
    isend, batch = dist.isend, dist.batch_isend_irecv

    def counting(*arguments):
        sends.append(arguments)
        return isend(*arguments)

    def counting_batch(operations):
        sends.extend(operation for operation in operations if operation.op is isend)
        return batch(operations)

    if build is BatchedCommunicator:
        dist.batch_isend_irecv = counting_batch
    else:
        dist.isend = counting
    try:
        for _ in range(2):
            communicator = build(peers, schedule, rank)
            for step, action in enumerate(schedule.stages[rank]):
                incoming = communicator.exchange(step, outgoing)
                time.sleep(random.Random(f"{rank} {step}").random() * 2e-3)
                outgoing = None
                if action.kind is ActionKind.BACKWARD_WEIGHT:
                    assert incoming is None
                    continue
                outgoing = torch.full((3, 5), 100.0 * action.micro_batch) if incoming is None else incoming + 1
                assert (outgoing == outgoing[0, 0]).all()
                arrived[str(action)] = float(outgoing[0, 0])
                # A view that is not contiguous must arrive with its values in order.
                outgoing = outgoing.t().contiguous().t()
                most = max(most, len(getattr(communicator, "_leaving", ())))
            communicator.finish(outgoing)
            outgoing = None
            for left in ("_leaving", "_arriving", "_handed_over"):
                assert not getattr(communicator, left, ())
    finally:
        dist.isend, dist.batch_isend_irecv = isend, batch
    return arrived, most, len(sends) // 2


SIZES = [(2, 1), (2, 5), (3, 4), (4, 2), (4, 4), (4, 11)]


@pytest.mark.parametrize(
    ("build", "kind"),
    [
        *((tagged, kind) for kind in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "evaluate one", "evaluate v")),
        *((BatchedCommunicator, kind) for kind in ("gpipe", "1f1b", "zb-h1", "evaluate one")),
        *((OrderedCommunicator, kind) for kind in ("1f1b", "interleaved", "zb-h1", "zb-v", "evaluate loop")),
    ],
)
@pytest.mark.parametrize(("pp", "count"), SIZES)
def test_messages_arrive_as_the_table_says(ranks, build, kind, pp, count):
    schedule = table(kind, pp, count)
    results = ranks.run(run_table, build, kind, count, world_size=pp)
    last = schedule.placement.num_virtual_stages - 1
    for rank, (arrived, most, _) in enumerate(results):
        assert build is OrderedCommunicator or most <= sends_under_way(schedule) + 1
        for action in schedule.stages[rank]:
            if action.kind is not ActionKind.BACKWARD_WEIGHT:
                stage = schedule.placement.virtual_stage(rank, action.chunk)
                distance = stage if action.kind is ActionKind.FORWARD else last - stage
                assert arrived[str(action)] == 100.0 * action.micro_batch + distance
    assert sum(sends for _, _, sends in results) == message_count(schedule)


def test_completed_sends_are_waited_for_before_their_tensors_are_freed(monkeypatch):
    """NCCL keeps the memory of a send until wait; gloo never reports completion."""
    waited = []

    class Completed:
        def __init__(self, tensor):
            self.tensor = tensor

        def is_completed(self):
            return True

        def wait(self):
            waited.append(float(self.tensor[0]))

    def receive(buffer, *_):
        return Completed(buffer.fill_(-1.0))

    monkeypatch.setattr(dist, "isend", lambda tensor, *_: Completed(tensor))
    monkeypatch.setattr(dist, "irecv", receive)
    peers = PipelinePeers(None, None, (0, 1), [(1,)] * 4, torch.float32, torch.device("cpu"))
    schedule = one_f_one_b(2, 4)
    communicator = OrderedCommunicator(peers, schedule, 0)
    outgoing = None
    for step, action in enumerate(schedule.stages[0]):
        communicator.exchange(step, outgoing)
        outgoing = torch.full((1,), float(action.micro_batch)) if action.kind is ActionKind.FORWARD else None
    # Before finish, which waits for the remaining sends in any case.
    assert [number for number in waited if number >= 0] == [0.0, 1.0, 2.0, 3.0]


def test_a_pipeline_of_one_rank_passes_outputs_to_itself():
    communicator = build_communicator(None, zb_v(1, 1), 0)
    assert type(communicator) is StageCommunicator
    down, gradient = torch.ones(1), torch.zeros(1)
    assert communicator.exchange(0, None) is None  # F0
    assert communicator.exchange(1, down) is down  # F0.1
    assert communicator.exchange(2, None) is None  # I0.1
    assert communicator.exchange(3, gradient) is None  # W0.1
    assert communicator.exchange(4, None) is gradient  # I0
    assert communicator.exchange(5, None) is None  # W0
    communicator.finish(None)


def chosen(rank, world_size, backend):
    """Class of the communicator for a group with this backend."""
    peers, names = peers_of(rank, world_size, 8), []
    real, dist.get_backend = dist.get_backend, lambda *_: backend
    try:
        for kind in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"):
            communicator = build_communicator(peers, table(kind, world_size, 8), rank)
            names.append(type(communicator).__name__.removesuffix("Communicator"))
    finally:
        dist.get_backend = real
    return names


def test_the_messenger_is_chosen_by_backend_and_table(ranks):
    assert ranks.run(chosen, "gloo", world_size=2) == [["Tagged"] * 5] * 2
    expected = ["Batched", "Batched", "Ordered", "Ordered", "Ordered"]
    assert ranks.run(chosen, "nccl", world_size=2) == [expected] * 2


def test_a_missing_output_is_a_fault_of_the_caller():
    communicator = StageCommunicator(())
    with pytest.raises(AssertionError, match="gave no tensor to send as F0 for virtual stage 1 from rank 0 to rank 1"):
        communicator._keep_local(next(e.send for e in exchanges(one_f_one_b(2, 1), 0)), None)

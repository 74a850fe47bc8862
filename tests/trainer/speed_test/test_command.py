"""The measuring process with real ranks: two on gloo, tiny sizes. No test compares a time."""

from __future__ import annotations

import socket

import pytest
import torch

from trainer.config.records.measured_hardware import SCHEMA
from trainer.speed_test.command import Steps, measure
from trainer.speed_test.sizes import Sizes

RANKS = 2
TINY = Sizes(((8, 4, 2), (3, 5, 7)), ((1, 2, 16, 8),), copy=4096, launches=3, messages=(8, 1024), seconds=1e-3)
MESSAGES = ["all-reduce", "all-gather", "reduce-scatter", "send"]


def measured(rank, _world_size, nodes):
    return measure(torch.device("cpu"), TINY, is_first=nodes == 2 or rank == 0, steps=Steps(speaks=False))


def check_whole(document, nodes):
    assert (document["schema"], document["nodes"], document["devices_per_node"]) == (SCHEMA, nodes, 2 // nodes)
    assert document["hosts"] == [socket.gethostname()] * nodes
    assert (document["device"], document["backend"], document["cuda"]) == ("CPU", "gloo", torch.version.cuda)
    assert document["device_memory_bytes"] is None
    for one in document["measurements"]:
        assert one["seconds"] > 0 and one["repetitions"] >= 3, one
        assert one["rate"] == pytest.approx(one["work"] / one["seconds"]), one
        assert one["slowest_seconds"] >= one["seconds"] and one["slowest_host"] == socket.gethostname(), one


@pytest.mark.parametrize(("nodes", "group"), [(1, "node"), (2, "one per node")])
def test_the_document_is_whole(ranks, nodes, group):
    document, nothing = ranks.run(measured, nodes)
    assert nothing is None
    check_whole(document, nodes)
    found = [(one["what"], one["group"], one["ranks"], one["bytes"]) for one in document["measurements"]]
    alone = [("product", None), ("product", None), ("attention forward", None), ("attention backward", None)]
    assert found == [
        *((what, "device", 1, size) for what, size in [*alone, ("copy", 4096), ("launch", None)]),
        *((what, group, 2, size) for what in MESSAGES for size in TINY.messages),
    ]


def test_the_work_is_that_of_the_shapes(ranks):
    document, _ = ranks.run(measured, 1)
    work = {(one["what"], *one["shape"], one["bytes"]): one["work"] for one in document["measurements"]}
    assert work["product", 8, 4, 2, None] == 2 * 8 * 4 * 2
    forward = 2 * (2 * 16 * 16 * 8) * 2 / 2  # two products of each of two heads, of which half counts
    assert work["attention forward", 1, 2, 16, 8, None] == forward
    assert work["attention backward", 1, 2, 16, 8, None] == 2 * forward
    assert work["copy", 4096] == 2 * 4096 and work["launch", None] == 1
    # Of nccl-tests: 2 (n - 1) / n, (n - 1) / n and 1.
    assert [work[what, 1024] for what in MESSAGES] == [1024, 512, 512, 1024]

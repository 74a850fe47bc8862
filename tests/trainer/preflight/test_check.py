"""The preflight on real ranks with gloo: as it is, and with one measurement replaced by a named one."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.trainer.preflight import replaced
from trainer.preflight import check as preflight
from trainer.preflight.check import (
    LIMIT_S,
    Instruments,
    Seat,
    Verdict,
    check_nodes,
    default_store,
    raise_failure,
)
from trainer.preflight.facts import RankFacts
from trainer.preflight.judgement import Finding
from trainer.process.failure import NodeError, PeerFailedError


def check(rank, world_size, folder, per_node, fault, at, name):
    """The findings, the speaker and the seconds; rank ``at`` has the measurement ``fault`` of ``replaced``."""
    tools = Instruments() if fault is None or rank != at else getattr(replaced, fault)(Instruments())
    seat = Seat(
        rank=rank,
        world_size=world_size,
        local_rank=rank % per_node,
        local_world_size=per_node,
        host=f"host{rank // per_node}",
        device=torch.device("cpu"),
        devices_asked=per_node,
        folders=(("run directory", Path(folder)),),
    )
    begin = time.monotonic()
    # A peer that does not come costs the whole limit.
    with patch.object(preflight, "_REDUCE_S", 3.0), patch.object(preflight, "_MEASURE_S", 5.0):
        verdict = check_nodes(seat, default_store(name), tools)
    taken = time.monotonic() - begin
    try:
        raise_failure(verdict, rank)
        raised = ""
    except (NodeError, PeerFailedError) as error:
        raised = type(error).__name__
    return [each.as_plain() for each in verdict.findings], verdict.speaker, taken, raised


@pytest.mark.parametrize(("world_size", "per_node"), [(1, 1), (2, 1), (4, 2), (3, 1)])
def test_sound_nodes_pass_in_time_and_leave_no_file(ranks, tmp_path, world_size, per_node):
    found = ranks.run(check, str(tmp_path), per_node, None, 0, "sound", world_size=world_size)
    assert [(findings, raised) for findings, _, _, raised in found] == [([], "")] * world_size
    assert max(taken for _, _, taken, _ in found) < LIMIT_S
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "at", "culprits", "says"),
    [
        ("slow", 2, ["host2"], "node host2 (rank 2): speed of a matrix product: "),
        ("fewer_devices", 1, ["host1"], "node host1 (rank 1): number of GPUs: 0, expected 1, as asked"),
        ("broken_device", 3, ["host3"], "errors that the GPU reports: a row of its memory could not be remapped"),
        ("unwritable", 3, ["host3"], ": [Errno 13] Permission denied, expected a folder that other nodes can write"),
        ("full_disk", 1, [], ": [Errno 28] No space left on device, expected room for a file; make room there"),
        ("failing", 1, ["host1"], "node host1 (rank 1): measurements: OSError: the device is gone, expected an answer"),
        ("hanging", 3, ["host3"], "node host3 (rank 3): measurements: no end after 5 s, expected an answer"),
        ("wrong_sums", 2, ["host2"], "node host2 (rank 2): sum over ranks (all-reduce) of the node alone: "),
        ("no_partner", 1, ["host1"], "node host1 (rank 1): sum over ranks (all-reduce) with node host"),
    ],
)
def test_a_bad_node_is_named_and_not_its_partner(ranks, tmp_path, fault, at, culprits, says):
    found = ranks.run(check, str(tmp_path), 1, fault, at, fault)
    for findings, speaker, taken, _ in found:
        assert findings[0]["is_fatal"] and findings[0]["culprits"] == culprits
        assert says in findings[0]["sentence"]
        assert speaker == at and taken < LIMIT_S
        assert [each["culprits"] for each in findings if each["is_fatal"]] == [culprits]
    raised = ["NodeError" if rank == at else "PeerFailedError" for rank in range(4)]
    assert [each for *_, each in found] == raised


@pytest.mark.parametrize("fault", ["old_clock", "little_memory"])
def test_a_remark_ends_nothing(ranks, tmp_path, fault):
    for findings, _, _, raised in ranks.run(check, str(tmp_path), 1, fault, 2, fault):
        assert raised == ""
        assert [(each["host"], each["is_fatal"], each["culprits"]) for each in findings] == [("host2", False, [])]


def test_a_second_measurement_clears_a_rank_that_was_disturbed(ranks, tmp_path):
    for findings, *_ in ranks.run(check, str(tmp_path), 1, "slow_at_first", 1, "again"):
        assert [each for each in findings if each["is_fatal"]] == []


def test_all_nodes_at_fault_are_culprits():
    """The first one is told in full, the others by their names; a full disk is none of them."""
    at_fault = [Finding(n, f"n{n}", "clock", "1", "2", "wait", culprits=(f"n{n}",)) for n in range(1, 8)]
    remark = Finding(9, "n9", "clock", "1", "2", "wait", is_fatal=False)
    full = Finding(8, "n8", "run directory", "full", "room", "make room")
    with pytest.raises(NodeError, match=r"\(rank 1\): .*; wait; also unfit: n2, n3, n4, n5 and 2 more$") as caught:
        raise_failure(Verdict([*at_fault, full, remark], speaker=1), 1)
    assert caught.value.culprits == tuple(f"n{n}" for n in range(1, 8))
    with pytest.raises(NodeError, match=r"make room$") as caught:
        raise_failure(Verdict([full, remark], speaker=8), 8)
    assert caught.value.culprits == ()


def answers_late(rank, world_size):
    """Rank 1 says that it is there, and then no more."""
    store = default_store("silent")
    if rank == 1:
        store.set("hello/1", RankFacts(1, "host1").as_text())
        return None
    seat = Seat(0, world_size, 0, 1, "host0", torch.device("cpu"))
    with patch.object(preflight, "_MEASURE_S", 2.0):
        verdict = check_nodes(seat, store, replace(Instruments(), speed=lambda *_: 1e9))
    return verdict.findings[0].as_plain(), verdict.speaker


def test_a_rank_that_falls_silent_is_named_by_rank_0(ranks):
    (found, speaker), _ = ranks.run(answers_late, world_size=2)
    assert (found["rank"], found["culprits"], speaker) == (1, ["host1"], 0)
    assert "measurements: no answer after 2 s, expected an answer" in found["sentence"]

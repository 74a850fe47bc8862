"""Numbers of the collectives in the heartbeat, on real ranks: they name the rank that the others wait for."""

import json
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.trainer.training.pretraining_job import Job
from tests.waiting import wait_for
from trainer.distributed.mesh import ParallelMesh, build_process_groups
from trainer.process.heartbeat import CollectivesEntered, Heartbeat
from trainer.training.collective_counts import CollectiveCounts

ENTERED = timedelta(seconds=300)


def settled(counts, ready):
    """The collectives of this rank's main thread, once ``ready`` holds for them."""
    found = []

    def look():
        found.append(counts.read())
        return ready(found[-1])

    wait_for(look, "the collective", step_s=0.01)
    return found[-1]


def count_until_the_last_one_enters(rank, world_size, enter):
    """Rank 1 enters only after the others were seen inside; returns what each thread beside saw."""
    groups = build_process_groups(ParallelMesh(tp=2, pp=1, dp=2, rank=rank), ENTERED)
    counts, store, seen = CollectiveCounts(), dist.distributed_c10d._get_default_store(), []
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=groups.dp_cp)
    before = counts.read()

    def watch():
        # The main thread enters the function a moment before torch counts the collective.
        seen.append(settled(counts, lambda found: bool(found.inside) and found.groups["dp_cp"] != (1, 1)))
        store.add("inside", 1)

    if rank == 1:
        wait_for(lambda: store.add("inside", 0) == world_size // 2 - 1, "the others")
        seen.append(counts.read())
    thread = threading.Thread(target=watch)
    if rank == 3:
        thread.start()
    if rank in (1, 3):
        enter(tensor, groups.dp_cp)
    if thread.ident is not None:
        thread.join()
    return before, seen


def reduce(tensor, group):
    dist.all_reduce(tensor, group=group)


def begin_and_wait(tensor, group):
    dist.all_gather_into_tensor(torch.empty(8), tensor, group=group)


@pytest.mark.parametrize(("enter", "name"), [(reduce, "all_reduce"), (begin_and_wait, "all_gather_into_tensor")])
def test_the_rank_outside_has_a_smaller_number_than_the_one_that_waits(ranks, enter, name):
    _, (before, outside), _, (_, waiting) = ranks.run(count_until_the_last_one_enters, enter)
    assert before.groups == {"world": (0, before.groups["world"][1]), "tp": (0, 0), "dp_cp": (1, 1)}
    assert (outside[0].groups["dp_cp"], outside[0].inside) == ((1, 1), "")
    assert (waiting[0].groups["dp_cp"], waiting[0].groups["tp"]) == ((1, 2), (2, 0))
    assert (waiting[0].inside, waiting[0].group) == (name, "dp_cp")


def beat(run, rank):
    return json.loads((run / f"attempts/1/heartbeat/rank-{rank:05d}.json").read_text())


def write_config(run, **parallel):
    values = {
        "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 100},
        "training": {"train_iters": 100000, "seq_length": 16, "global_batch_size": 4, "eval_iters": 0},
        "optimizer": {"lr": 1e-3},
        "data": {"mock_data": True},
        "parallel": parallel,
    }
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps(values))


def test_a_stopped_rank_is_behind_in_the_files_and_the_others_are_inside(tmp_path):
    write_config(tmp_path / "run")
    with Job(tmp_path / "run", 2) as job:
        job.wait_for_iteration(2)
        wait_for(lambda: "dp_cp" in beat(job.run, 1).get("groups", ()), "the groups")
        os.kill(job.ranks[1].pid, signal.SIGSTOP)
        # What the file of a rank that hangs still changes is its sign of life.
        first = beat(job.run, 0)
        wait_for(lambda: beat(job.run, 0)["written"] > first["written"] + 3, "a sign of life")
        first = beat(job.run, 0)
        wait_for(lambda: beat(job.run, 0)["written"] > first["written"], "a sign of life")
        last, stopped = beat(job.run, 0), beat(job.run, 1)
    assert {**last, "written": 0} == {**first, "written": 0}
    assert last["inside"]["name"] and last["inside"]["group"] in ("world", "dp_cp")
    assert stopped["written"] < last["written"]
    assert stopped["groups"]["world"][1] <= last["groups"]["world"][1]


def test_a_collective_is_progress_and_the_wait_in_one_is_not(tmp_path):
    now = [CollectivesEntered({"tp": (0, 1)})]
    path = tmp_path / "rank-00000.json"
    with Heartbeat(path, 0) as heartbeat:
        heartbeat.follow(lambda: now[0])
        heartbeat._write()
        first = json.loads(path.read_text())
        now[0] = CollectivesEntered({"tp": (0, 1)}, "all_reduce", "tp")
        heartbeat._write()
        waiting = json.loads(path.read_text())
        now[0] = CollectivesEntered({"tp": (0, 2)})
        heartbeat._write()
        entered = json.loads(path.read_text())
    assert waiting["time"] == first["time"] < entered["time"]
    assert (waiting["inside"]["name"], waiting["inside"]["group"]) == ("all_reduce", "tp")
    assert waiting["inside"]["since"] >= first["time"]
    assert "inside" not in entered
    assert entered["groups"] == {"tp": [0, 2]}


def test_a_sign_of_life_is_written_in_place(tmp_path, monkeypatch):
    clock = [time.time()]
    monkeypatch.setattr("trainer.process.heartbeat.time.time", lambda: clock[0])
    path = tmp_path / "rank-00000.json"
    with Heartbeat(path, 0) as heartbeat:
        first, inode = json.loads(path.read_text()), path.stat().st_ino
        clock[0] += 2
        heartbeat._write()
        assert json.loads(path.read_text()) == first
        clock[0] += 4
        heartbeat._write()
        assert json.loads(path.read_text()) == {**first, "written": int(clock[0])}
        assert path.stat().st_ino == inode


def test_counts_that_cannot_be_read_leave_the_heartbeat(tmp_path):
    def fail():
        raise AttributeError("no such counter")

    path = tmp_path / "rank-00000.json"
    with Heartbeat(path, 0) as heartbeat:
        heartbeat.follow(fail)
        heartbeat.beat(3, "data")
    assert json.loads(path.read_text())["iteration"] == 3

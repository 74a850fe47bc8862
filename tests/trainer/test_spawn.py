"""Results, failures and hangs of test ranks reach the caller.

No process stays behind.
"""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.trainer.spawn import RankError, Ranks


@pytest.fixture(scope="module")
def ranks():
    with Ranks(3) as ranks:
        yield ranks


def add_up(rank, world_size, addend):
    total = torch.tensor([rank + addend])
    dist.all_reduce(total)
    assert dist.get_world_size() == world_size
    return int(total), os.getpid()


def fail_on_one(rank, _world_size):
    if rank == 1:
        raise ValueError("the reason, in full")
    dist.barrier()


def die_on_one(rank, _world_size):
    if rank == 0:
        os._exit(7)
    dist.barrier()


def hang(_rank, _world_size):
    time.sleep(60)


def test_many_runs_of_several_sizes_in_the_same_processes(ranks):
    results = [ranks.run(add_up, 10, world_size=size) for size in (3, 1, 2, 3)]
    assert [[total for total, _ in result] for result in results] == [[33] * 3, [10], [21] * 2, [33] * 3]
    assert len({pid for result in results for _, pid in result}) == 3


def test_an_error_comes_with_its_traceback_and_the_pool_still_works(ranks):
    with pytest.raises(RankError, match=r"rank 1 of 3(.|\n)*in fail_on_one(.|\n)*the reason, in full"):
        ranks.run(fail_on_one)
    with pytest.raises(RankError, match="rank 0 of 2: died with exit code 7"):
        ranks.run(die_on_one, world_size=2)
    assert [total for total, _ in ranks.run(add_up, 0)] == [3] * 3


def test_a_hang_ends_at_the_deadline():
    with Ranks(2, deadline_s=3) as ranks:
        with pytest.raises(RankError, match="gave no answer in 3 s"):
            ranks.run(hang)
        assert ranks._processes == []

"""Pretraining in several real processes, with optional faults."""

import json
import os
import sys
import time

from tests.rank_server import rank_context
from tests.resume_torture import free_port
from tests.waiting import HANG_S, wait_for


def be_rank(run, number, rank, world_size, port, fault):
    """Call ``fault``, which may break the trainer, then pretrain in this process."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LLMCTL_RUN_DIR": str(run),
        "LLMCTL_ATTEMPT": str(number),
    }
    from trainer.__main__ import main

    if fault is not None:
        fault()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    sys.exit(main(["pretrain", "--config", str(run / "config.yaml")]))


class Job:
    """The ranks of one attempt.

    A context manager, which kills every process at its end.
    """

    def __init__(self, run, world_size, faults=None, absent=(), number=1):
        """Start ``world_size`` ranks except those ``absent``; ``faults``: rank -> function to call first."""
        self.run = run
        port = free_port()
        faults = faults or {}
        self.ranks = {
            rank: rank_context().Process(target=be_rank, args=(run, number, rank, world_size, port, faults.get(rank)))
            for rank in range(world_size)
            if rank not in absent
        }
        for process in self.ranks.values():
            process.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.ranks.values():
            process.kill()
            process.join(timeout=HANG_S)

    def wait_for_iteration(self, iteration):
        """Wait until ``iteration`` iterations are logged."""
        assert self.reaches_iteration(iteration), "a rank ended before its time"

    def reaches_iteration(self, iteration):
        """True once ``iteration`` iterations are logged, False if a rank ends before."""
        return reaches_iteration(self.run, iteration, lambda: all(p.exitcode is None for p in self.ranks.values()))

    def ends(self, ranks):
        """Exit codes of ``ranks``, once all have left; None of a rank that hangs."""
        end = time.monotonic() + HANG_S
        for rank in ranks:
            self.ranks[rank].join(timeout=max(0.1, end - time.monotonic()))
        return [self.ranks[rank].exitcode for rank in ranks]


def reaches_iteration(run, iteration, is_running):
    """True once the row of ``iteration`` is logged, False if ``is_running()`` is False before."""
    metrics = run / "metrics.jsonl"

    def is_logged():
        lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
        return any(json.loads(line)["iteration"] >= iteration for line in lines)

    wait_for(lambda: is_logged() or not is_running(), f"iteration {iteration}", step_s=0.02)
    return is_logged()

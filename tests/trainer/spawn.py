"""Real ranks for tests, in a pool of processes that run many cases.

    def test_sum(ranks):                     # the fixture of tests/trainer/conftest.py
        assert ranks.run(add_up, 10, world_size=2) == [21, 21]     # add_up(rank, world_size, 10) on two of the four

Each run gets a default gloo process group over its first ``world_size`` ranks, made before and destroyed after the run,
so that the code under test sees only a job of that size. Functions must be importable (top level of a module);
arguments and results are pickled. After a rank has failed or hung, the next run starts new processes.
"""

from __future__ import annotations

import gc
import multiprocessing.connection
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Self

from tests.rank_server import rank_context
from tests.waiting import HANG_S

DEADLINE_S = HANG_S
# Once one rank has failed, the others wait for it; a rank that has a result reports it at once.
GRACE_S = 20.0


class RankError(AssertionError):
    """A case failed on some ranks; the message holds every traceback."""


class Ranks:
    """A pool of ``size`` rank processes with one CPU thread each.

    A context manager; nothing is left behind.
    """

    def __init__(self, size: int, deadline_s: float = DEADLINE_S) -> None:
        self.size = size
        self.deadline_s = deadline_s
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._runs = 0
        # The store is in this process, on a port that the kernel chooses, so that no two pools share it.
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=deadline_s)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, function: Callable[..., Any], *arguments: Any, world_size: int | None = None) -> list[Any]:
        """``function(rank, world_size, *arguments)`` on the first ``world_size`` ranks; the results in rank order.

        Raises:
            RankError: some rank raised, died, or did not answer in time.
        """
        world_size = world_size or self.size
        assert world_size <= self.size, f"{world_size} ranks requested of a pool of {self.size}"
        if not self._processes:
            self._start()
        self._runs += 1
        for pipe in self._pipes[:world_size]:
            pipe.send((function, arguments, world_size, self._runs))
        answers, problems = self._collect(world_size)
        if problems:
            self._stop()
            raise RankError("\n".join(f"rank {rank} of {world_size}: {problems[rank]}" for rank in sorted(problems)))
        return [answers[rank] for rank in range(world_size)]

    def _collect(self, world_size: int) -> tuple[dict[int, Any], dict[int, str]]:
        answers: dict[int, Any] = {}
        problems: dict[int, str] = {}
        waiting = {self._pipes[rank]: rank for rank in range(world_size)}
        deadline = time.monotonic() + self.deadline_s
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in multiprocessing.connection.wait(list(waiting), timeout=left):
                rank = waiting.pop(pipe)
                try:
                    succeeded, value = pipe.recv()
                except EOFError:
                    self._processes[rank].join(GRACE_S)
                    succeeded, value = False, f"died with exit code {self._processes[rank].exitcode}"
                (answers if succeeded else problems)[rank] = value
                if not succeeded:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in waiting.values():
            problems[rank] = f"gave no answer{'' if problems else f' in {self.deadline_s:g} s'}"
        return answers, problems

    def _start(self) -> None:
        context = rank_context()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, self._store.port), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(0.2)
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        self._processes, self._pipes = [], []


def _serve(rank: int, pipe: Any, port: int) -> None:
    """Loop of a rank process: serve runs until the pipe is closed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments, world_size, run = pipe.recv()
        except (EOFError, OSError):
            return
        except BaseException:  # the function's own module could not be imported here
            pipe.send((False, traceback.format_exc()))
            continue
        # Modules imported so far are never freed; the collection after each run need not scan them.
        gc.freeze()
        try:
            pipe.send((True, _run(rank, port, run, world_size, function, arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _run(rank: int, port: int, run: int, world_size: int, function: Callable[..., Any], arguments: Any) -> Any:
    timeout = timedelta(seconds=DEADLINE_S)
    store = dist.PrefixStore(f"run{run}", dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        result = function(rank, world_size, *arguments)
        # A rank that finishes early must not close its connections while another still opens them.
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()
        # A model has reference cycles; uncollected, it would keep the run's groups and their polling threads alive.
        gc.collect()

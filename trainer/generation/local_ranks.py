"""The ranks of a command on this machine, without a launcher."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, MutableMapping
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from typing_extensions import Self

from trainer.process.launch_environment import LaunchEnvironment

TIMEOUT = timedelta(minutes=10)
_HOST = "127.0.0.1"
_FAILED = 1
_LEAVING_S = 5.0

Work = Callable[..., int]
"""Takes this rank's LaunchEnvironment, the store at which the ranks meet, and more; returns an exit code."""


class LocalRanks:
    """This process as rank 0, and ``count`` - 1 child processes that do the same work.

    A context manager: at its end, and if this process dies, no child is left.
    """

    def __init__(self, count: int, environment: MutableMapping[str, str]) -> None:
        """Make the place where the ranks meet.

        Args:
            count: number of ranks, at least 1.
            environment: variables of this process, which the children inherit; completed.
        """
        self._count = count
        self._children: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[multiprocessing.connection.Connection] = []
        if count > 1:
            # Gloo would look up the host's name, which need not lead back to this machine.
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
            asked = environment.get("OMP_NUM_THREADS", "")
            self._threads = int(asked) if asked.isdecimal() else max(1, len(os.sched_getaffinity(0)) // count)
            # The kernel chooses the port.
            self._store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for child in self._children:
            child.join(_LEAVING_S)
            child.kill()
            child.join()

    def run(self, work: Work, *arguments: Any) -> int:
        """Do ``work`` on every rank, and return rank 0's exit code; the arguments are pickled."""
        if self._count == 1:
            return work(LaunchEnvironment(), None, *arguments)
        context = multiprocessing.get_context("spawn")
        for rank in range(1, self._count):
            ours, theirs = context.Pipe()
            place = (_launch(rank, self._count), self._store.port, self._threads)
            child = context.Process(target=_serve, args=(work, place, theirs, arguments), daemon=True)
            child.start()
            theirs.close()
            self._pipes.append(ours)
            self._children.append(child)
        torch.set_num_threads(self._threads)
        return work(_launch(0, self._count), self._store, *arguments)

    def failed_rank(self) -> int | None:
        """Number of a child that has ended with an error; None if there is none."""
        for rank, child in enumerate(self._children, 1):
            child.join(_LEAVING_S / len(self._children))
            if child.exitcode:
                return rank
        return None


def _launch(rank: int, count: int) -> LaunchEnvironment:
    return LaunchEnvironment(rank, rank, count, count, launcher="trainer")


def _serve(
    work: Work,
    place: tuple[LaunchEnvironment, int, int],
    pipe: multiprocessing.connection.Connection,
    arguments: tuple[Any, ...],
) -> None:
    """One child. Ctrl-C is for rank 0, at whose end the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, args=(pipe,), daemon=True).start()
    launch, port, threads = place
    torch.set_num_threads(threads)
    store = TCPStore(_HOST, port, is_master=False, timeout=TIMEOUT)
    code = work(launch, store, *arguments)
    if code:
        os._exit(code)


def _leave_with_parent(pipe: multiprocessing.connection.Connection) -> None:
    try:
        pipe.recv()
    except (EOFError, OSError):
        # A collective may be pending, which a normal exit would wait for.
        os._exit(_FAILED)

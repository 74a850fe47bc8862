"""Requests of the ranks after a step; the end, on all ranks, of a run that another process has taken over."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from trainer.distributed.collectives import any_rank
from trainer.process.failure import PeerFailedError

if TYPE_CHECKING:
    from trainer.process.run_lock import RunLock


class Requests(NamedTuple):
    """Requests of one rank, or of all of them.

    Attributes:
        stops: the rank, or any rank, has a stop request.
        switches: it has its kernels, or any rank has.
        drained: it has drained a save; all have.
    """

    stops: bool
    switches: bool
    drained: bool


def poll(
    own: Requests, lock: RunLock | None, sums: torch.Tensor, beside: torch.Tensor
) -> tuple[list[float], list[float], Requests]:
    """Read numbers of the device and the requests of all ranks, with one wait for the device.

    Collective: all ranks.

    Args:
        own: of this rank.
        lock: of the run, on rank 0; None elsewhere.
        sums: float64 [N] on the device, which are summed over all ranks.
        beside: float64 [M] on the device, the same on all ranks.

    Returns:
        Sums, the numbers beside them, and the requests of the ranks together.

    Raises:
        LostLockError: on rank 0, another process has taken the run over.
        PeerFailedError: the same on all other ranks.
    """
    is_lost = lock is not None and lock.is_known_lost
    flags = torch.tensor([*own, is_lost], dtype=torch.float64).to(sums.device, non_blocking=True)
    totals, world_size = torch.cat([sums, flags]), dist.get_world_size()
    if world_size > 1:
        dist.all_reduce(totals)
    values: list[float] = torch.cat([totals, beside]).tolist()
    count = sums.numel()
    stops, switches, drained, lost = values[count : count + flags.numel()]
    if lost:
        end_lost_run(lock)
    requests = Requests(stops > 0.0, switches > 0.0, drained == world_size)
    return values[:count], values[count + flags.numel() :], requests


def check_lock(lock: RunLock | None, device: torch.device) -> None:
    """End the run on all ranks if another process has taken it over. Collective: all ranks.

    Args:
        lock: of the run, on rank 0; None elsewhere.
        device: of the small tensors of collectives.

    Raises:
        LostLockError: on rank 0, another process has taken the run over.
        PeerFailedError: the same on all other ranks.
    """
    if any_rank(lock is not None and lock.is_lost(), device):
        end_lost_run(lock)


def end_lost_run(lock: RunLock | None) -> NoReturn:
    """Raise LostLockError on rank 0, PeerFailedError on all others."""
    if lock is not None:
        lock.check()
    raise PeerFailedError("another process has taken the run over: rank 0 reports which")

"""The end of a run that another process has taken over, on all ranks together."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from trainer.distributed.collectives import any_rank
from trainer.process.failure import PeerFailedError

if TYPE_CHECKING:
    import torch

    from trainer.process.run_lock import RunLock


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

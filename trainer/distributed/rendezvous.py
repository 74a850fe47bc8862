"""The default process group of a job."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def join_ranks(
    rank: int, world_size: int, device: torch.device, timeout: timedelta, store: Store | None = None
) -> None:
    """Create the default process group: NCCL for a GPU, else gloo. Collective: all ranks.

    Several ranks meet at ``store``, or else by the variables that torch.distributed reads (``env://``); a single rank
    needs no port.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    device_id = device if device.type == "cuda" else None
    if world_size == 1 and store is None:
        store = dist.HashStore()  # type: ignore[attr-defined]
    if store is None:
        dist.init_process_group(backend, init_method="env://", timeout=timeout, device_id=device_id)
        return
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device_id
    )

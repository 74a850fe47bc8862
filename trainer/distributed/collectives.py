"""Collectives on small values, and names of torch's collectives that every supported release has.

The four functions on values are collective over all ranks of the job.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

# torch 2.13 warns on every use of the old names; earlier releases have only those.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def sum_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Element-wise sum in float64, the same bits on every rank."""
    return _reduce(values, device, dist.ReduceOp.SUM)


def max_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Element-wise maximum."""
    return _reduce(values, device, dist.ReduceOp.MAX)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether any rank says yes."""
    return max_over_ranks([float(flag)], device)[0] > 0.0


def from_first_rank(values: Sequence[int], device: torch.device) -> list[int]:
    """Rank 0's values, on every rank; all must pass as many."""
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    if dist.get_world_size() > 1:
        dist.broadcast(tensor, src=0)
    return [int(value) for value in tensor.tolist()]


def _reduce(values: Sequence[float], device: torch.device, operation: dist.ReduceOp.RedOpType) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor, op=operation)
    return [float(value) for value in tensor.tolist()]


def is_gloo(group: dist.ProcessGroup | None) -> bool:
    """Whether ``group``, or the default one, communicates through gloo, which has tags and other fast primitives."""
    return bool(dist.get_backend(group) == "gloo")


def message_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """The device to send from and to receive on, for tensors of ``device``: their own wherever that is possible.

    Gloo's send and receive read host memory by its address; its collectives take the way through the host by
    themselves.
    """
    return torch.device("cpu") if is_gloo(group) else device

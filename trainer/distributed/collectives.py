"""Collectives on small values, and torch's single-tensor collectives by version-independent names.

The five functions on values are collective over all ranks of the job. A thread beside the training passes a ``group``
of its own with all ranks, and the device that its backend uses; None: the default group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

# torch 2.13 warns on every use of the old names; earlier releases have only the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def sum_over_ranks(
    values: Sequence[float], device: torch.device, group: dist.ProcessGroup | None = None
) -> list[float]:
    """Element-wise sum in float64, bitwise equal on every rank."""
    return _reduce(values, device, dist.ReduceOp.SUM, group)


def max_over_ranks(
    values: Sequence[float], device: torch.device, group: dist.ProcessGroup | None = None
) -> list[float]:
    """Element-wise maximum."""
    return _reduce(values, device, dist.ReduceOp.MAX, group)


def any_rank(flag: bool, device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """True if ``flag`` is true on any rank."""
    return max_over_ranks([float(flag)], device, group)[0] > 0.0


def from_first_rank(values: Sequence[int], device: torch.device, group: dist.ProcessGroup | None = None) -> list[int]:
    """Rank 0's values on every rank.

    All ranks must pass the same number of values.
    """
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    if dist.get_world_size() > 1:
        dist.broadcast(tensor, src=0, group=group)
    return [int(value) for value in tensor.tolist()]


def first_text(text: str, device: torch.device, group: dist.ProcessGroup | None = None) -> str:
    """The text of the first rank that has one, on every rank; empty if none has."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return text
    source = int(_reduce([float(rank if text else size)], device, dist.ReduceOp.MIN, group)[0])
    if source == size:
        return ""
    data = text.encode()
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(length, src=source, group=group)
    content = torch.tensor(list(data) if rank == source else [0] * int(length), dtype=torch.uint8, device=device)
    dist.broadcast(content, src=source, group=group)
    return bytes(content.tolist()).decode()


def _reduce(
    values: Sequence[float],
    device: torch.device,
    operation: dist.ReduceOp.RedOpType,
    group: dist.ProcessGroup | None,
) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64).to(device, non_blocking=True)
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor, op=operation, group=group)
    return [float(value) for value in tensor.tolist()]


def is_gloo(group: dist.ProcessGroup | None) -> bool:
    """True if ``group`` (None: the default group) uses gloo, which supports tags."""
    return bool(dist.get_backend(group) == "gloo")


def message_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Device on which tensors of ``device`` must be for send and receive.

    Gloo's send and receive need host memory; its collectives copy through the host themselves.
    """
    return torch.device("cpu") if is_gloo(group) else device

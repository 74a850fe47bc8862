"""Small numbers that all ranks must see alike. Every function is collective over all ranks of the job."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


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

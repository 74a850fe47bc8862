"""All-reduce over some ranks in a process group of its own, with a time limit and a check of the sum."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainer.preflight.exchange import LateError, bounded

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_ELEMENTS = 1 << 18
"""2 MiB of int64, whose sums are exact for any number of ranks."""
_ABORT_S = 600.0
"""Timeout of NCCL's own watchdog, which would end the process: the preflight gives up much earlier."""


def contribution(index: int, device: torch.device) -> torch.Tensor:
    """Values of the rank at ``index`` of a group. # [_ELEMENTS]"""
    return (index + 1) * (torch.arange(_ELEMENTS, device=device, dtype=torch.int64) % 7 + 1)


def reduce_over(store: Store, ranks: Sequence[int], rank: int, device: torch.device, seconds: float) -> str:
    """All-reduce over ``ranks``; words on its failure, empty if the sum is right. Collective: all of ``ranks``.

    Args:
        store: with a prefix of this group; the call makes a connection of its own, since a wait blocks the others.
        ranks: members, in the same order on all of them.
        rank: this rank.
        device: its device.
        seconds: time limit.
    """
    connection = store.clone()  # type: ignore[attr-defined]
    try:
        return bounded(lambda: _reduce(connection, list(ranks), rank, device, seconds), seconds, "all-reduce")
    except LateError as error:
        return str(error)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[0] if lines else ''}".strip()[:300]


def _reduce(connection: Store, ranks: list[int], rank: int, device: torch.device, seconds: float) -> str:
    index, size = ranks.index(rank), len(ranks)
    group = _group(connection, index, size, device, seconds)
    values = contribution(index, device)
    group.allreduce([values]).wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    expected = size * (size + 1) // 2 * contribution(0, device)
    wrong = int((values != expected).sum())
    if device.type == "cuda":
        group.shutdown()
    return f"{wrong} of {_ELEMENTS} sums are wrong" if wrong else ""


def _group(connection: Store, index: int, size: int, device: torch.device, seconds: float) -> Any:
    """A process group outside of torch's registry: no other rank needs to know of it."""
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=_ABORT_S)
        return dist.ProcessGroupNCCL(connection, index, size, options)
    return dist.ProcessGroupGloo(connection, index, size, timedelta(seconds=seconds))

"""This rank's flight record: the newest collectives of all its groups, for torch's own ``torchfrtrace``.

torch keeps the record for gloo and NCCL alike, and writes it by itself only when a collective of NCCL times out
(https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html). torch 2.13 leaves the members of gloo's
groups out of it, without which no reader can tell who is missing.
"""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_C: Any = torch._C._distributed_c10d


def write_flight_record(path: Path) -> None:
    """Write the record to ``path``, unless NCCL has; a failure of the disk is ignored. From any thread, never waits."""
    if not dist.is_initialized() or path.exists():
        return
    record = pickle.loads(_C._dump_fr_trace(True, True, False))  # noqa: S301  # of this process itself
    record["pg_config"] = _groups()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        temporary.write_bytes(pickle.dumps(record))
        temporary.replace(path)


def _groups() -> dict[str, dict[str, str]]:
    """Name, words and ranks of each group of this rank, as NCCL's record has them."""
    found: dict[str, dict[str, str]] = {}
    # A copy in one step: the main thread may add or destroy a group meanwhile.
    for group, name in list(distributed_c10d._world.pg_names.items()):
        with suppress(RuntimeError, ValueError, KeyError):
            ranks = sorted(dist.get_process_group_ranks(group))
            found[name] = {"name": name, "desc": group.group_desc, "ranks": str(ranks)}
    return found

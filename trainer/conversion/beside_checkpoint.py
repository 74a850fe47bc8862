"""The Hugging Face folder beside a checkpoint that a run has just saved."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.checkpoint.directory import checkpoint_path, hub_path
from trainer.conversion.export_hub import Export, discard_unfinished, export_hub
from trainer.distributed.collectives import any_rank

_BYTES_PER_ROUND = 1 << 30


def write_hub_folder(root: Path, iteration: int, rank: int, device: torch.device) -> str | None:
    """Write the weights of a complete checkpoint as a Hugging Face folder beside it; returns what went wrong, if any.

    Rank 0 reads the checkpoint's files and writes, one tensor at a time. The others meet it once per gigabyte, so
    that a long export meets no timeout of a collective. A failure leaves no folder and keeps the checkpoint.
    Collective: all ranks; only rank 0 learns of a failure.

    Args:
        root: folder of checkpoints.
        iteration: of the checkpoint.
        rank: this rank.
        device: of the small tensors of collectives.
    """
    if rank != 0:
        while any_rank(False, device):
            pass
        return None
    written, problem = 0, None

    def advance(count: int) -> None:
        nonlocal written
        written += count
        if written >= _BYTES_PER_ROUND:
            written = 0
            any_rank(True, device)

    output = hub_path(root, iteration)
    try:
        export_hub(Export.open(checkpoint_path(root, iteration)), output, advance)
    except Exception as error:
        # Every kind of error: the others wait for this rank, and training can go on without the folder.
        discard_unfinished(output)
        problem = str(error) or type(error).__name__
    any_rank(False, device)
    return problem

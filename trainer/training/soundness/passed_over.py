"""Iterations whose samples are passed over: those of the config, and those of spikes that a run was rolled back from.

The latter stand in a file beside the checkpoints, so that every later attempt passes over them too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainer.checkpoint.directory import CheckpointError
from trainer.distributed.collectives import any_rank, first_text
from trainer.process.failure import PeerFailedError
from trainer.process.run_directory import write_json

if TYPE_CHECKING:
    import torch

FILE = "passed_over.json"
"""Beside the checkpoints: the iterations of spikes, ``{"iterations": [[FIRST, LAST], ...]}``, the oldest first."""


class PassedOver(NamedTuple):
    """Iterations, first and last, that make no step."""

    first: int
    last: int


def read_passed_over(root: Path | None, rank: int, device: torch.device) -> list[PassedOver]:
    """The iterations of earlier spikes, from the checkpoint folder ``root`` as rank 0 sees it. Collective: all ranks.

    Raises:
        CheckpointError: on rank 0, the file cannot be read.
        PeerFailedError: the same on all other ranks.
    """
    if root is None:
        return []
    found: list[PassedOver] = []
    problem: CheckpointError | None = None
    if rank == 0:
        try:
            found = _read(root / FILE)
        except (OSError, ValueError, TypeError, KeyError) as error:
            problem = CheckpointError(
                f"{root / FILE}, the iterations that this run passes over after spikes of the loss, cannot be read: "
                f"{error}; mend it, or remove it to train on all samples"
            )
    if any_rank(problem is not None, device):
        raise problem or PeerFailedError("rank 0 cannot read the iterations to pass over and reports the cause")
    return [PassedOver(*each) for each in json.loads(first_text(json.dumps(found), device))]


def write_passed_over(root: Path, ranges: Sequence[PassedOver]) -> None:
    """Replace the file in ``root`` with ``ranges``. Rank 0 only.

    Raises:
        OSError: the disk refuses it.
    """
    write_json(root / FILE, {"iterations": [list(each) for each in ranges]}, durable=True)


def _read(path: Path) -> list[PassedOver]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    ranges = [PassedOver(int(first), int(last)) for first, last in json.loads(text)["iterations"]]
    wrong = next((each for each in ranges if not 1 <= each.first <= each.last), None)
    if wrong is not None:
        raise ValueError(f"{list(wrong)} is not valid as a first and a last iteration")
    return ranges

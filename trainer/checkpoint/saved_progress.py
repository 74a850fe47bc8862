"""Protection of saved progress: no start at iteration 0 because a folder of checkpoints is missing.

A folder may be missing on some nodes only, because a mount is slow to come or has failed there.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint.directory import CheckpointError, holds_checkpoints
from trainer.config.errors import ConfigError
from trainer.config.records.saved_progress import METRICS_TAIL, SavedProgress, find_saved_progress, record_of
from trainer.distributed.collectives import any_rank, first_text, max_over_ranks
from trainer.process.failure import PeerFailedError
from trainer.process.run_directory import write_json

if TYPE_CHECKING:
    import torch

    from trainer.config.sections.checkpoint import CheckpointConfig
    from trainer.process.run_directory import RunDirectory

_POLL_S = 1.0


def agree_on_saved_progress(
    run: RunDirectory | None, save_interval: int | None, rank: int, device: torch.device
) -> SavedProgress | None:
    """Saved progress by the records that rank 0 sees, on all ranks; None if nothing was ever saved. Collective.

    Raises:
        CheckpointError: on rank 0, a record cannot be read.
        PeerFailedError: the same on all other ranks.
    """
    saved, problem = None, None
    if run is not None and rank == 0:
        try:
            saved = _read(run, save_interval)
        except OSError as error:
            problem = CheckpointError(f"the saved progress of this run cannot be read: {error}")
    if any_rank(problem is not None, device):
        raise problem or PeerFailedError("rank 0 cannot read the run's saved progress and reports the cause")
    text = first_text(json.dumps(asdict(saved)) if saved is not None else "", device)
    return SavedProgress(**json.loads(text)) if text else None


def _read(run: RunDirectory, save_interval: int | None) -> SavedProgress | None:
    outcomes = [_content(path) for path in run.path.glob("attempts/*/outcome.json")]
    metrics = _content(run.metrics, METRICS_TAIL)
    return find_saved_progress(str(run.path), _content(run.saved), metrics, outcomes, save_interval)


def _content(path: Path, tail: int | None = None) -> bytes | None:
    """The content of a file, or its last ``tail`` bytes; None without the file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - tail) if tail is not None else 0)
            return file.read()
    except FileNotFoundError:
        return None


def write_saved_progress(path: Path, iteration: int | None, folder: Path, attempt: int) -> None:
    """Record the newest saved iteration; None: nothing is saved yet. A full disk is only logged."""
    values = record_of(iteration, str(folder.absolute()), attempt, time.time())
    try:
        write_json(path, values, durable=True)
    except OSError as error:
        print(f"{path} could not be written: {error.strerror or error}", flush=True)


def await_checkpoints(
    saved: SavedProgress, root: Path, wait_s: float, rank: int, device: torch.device, goes_on: Callable[[], bool]
) -> None:
    """Wait until every rank sees checkpoints in ``root``. Collective: all ranks.

    Args:
        saved: the progress that the checkpoints must hold.
        root: folder of the run's checkpoints.
        wait_s: limit in seconds.
        rank: this rank.
        device: device of the messages between ranks.
        goes_on: called before each look; False ends the wait on all ranks.

    Raises:
        CheckpointError: this rank sees none.
        PeerFailedError: another rank sees none.
    """
    began, has_told = time.monotonic(), False
    while True:
        lack = describe_lack(root)
        is_over = not goes_on() or (rank == 0 and time.monotonic() - began >= wait_s)
        is_missing, ends = max_over_ranks([float(bool(lack)), float(is_over)], device)
        if not is_missing:
            return
        sentence = saved.missing(str(root), f"{lack} on {socket.gethostname()}") if lack else ""
        if ends:
            first = first_text(sentence, device)
            raise CheckpointError(first) if lack else PeerFailedError(first)
        if not has_told:
            first = first_text(f"{lack} on {socket.gethostname()}" if lack else "", device)
            if rank == 0:
                reason = "its mount may be slow to come (checkpoint.wait_for_folder_s)"
                print(f"checkpoint folder {root} {first}; waiting {wait_s:g} s for it: {reason}", flush=True)
            has_told = True
        time.sleep(min(_POLL_S, wait_s))


def describe_lack(root: Path) -> str:
    """The words for a folder without checkpoints, such as ``is empty``; empty if the folder has some."""
    try:
        if root.is_symlink() and not root.exists():
            return f"is a link to {root.readlink()}, which does not exist,"
        if not root.is_dir():
            return "is not a folder" if root.exists() else "does not exist"
        if holds_checkpoints(root):
            return ""
        return "holds no checkpoint" if any(root.iterdir()) else "is empty"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"


def check_start_is_not_missing(config: CheckpointConfig, save: Path | None, rank: int, device: torch.device) -> None:
    """Refuse a start without weights by checkpoint.exit_on_missing_checkpoint. Collective: all ranks.

    Only a folder that is both ``load`` and ``save`` may be empty at the first start of a run; check_start_point refuses
    any other ``load`` without a checkpoint.

    Raises:
        ConfigError: on rank 0, the folder holds no checkpoint.
        PeerFailedError: the same on all other ranks.
    """
    if config.load is None or not config.exit_on_missing_checkpoint:
        return
    problem, load = None, Path(config.load).expanduser()
    if rank == 0 and save is not None and load.resolve() == save.resolve() and (lack := describe_lack(load)):
        problem = ConfigError(
            "checkpoint.load",
            f"{load} {lack}, and checkpoint.exit_on_missing_checkpoint is set; correct or mount the folder, or set "
            "exit_on_missing_checkpoint: false to start from random weights",
        )
    if any_rank(problem is not None, device):
        raise problem or PeerFailedError("rank 0 finds no checkpoint to start from and reports the cause")

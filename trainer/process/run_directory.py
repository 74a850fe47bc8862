"""Paths in the run directory of a run that llmctl started.

The names are shared with llmctl. Torch-free.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.records.saved_progress import SAVED


@dataclass(frozen=True)
class RunDirectory:
    """Run directory, with the paths of one attempt.

    Attributes:
        path: the run's directory, shared by all nodes.
        attempt: number of this attempt, counted from 1.
    """

    path: Path
    attempt: int = 1

    @classmethod
    def from_variables(cls, environ: Mapping[str, str]) -> RunDirectory | None:
        """Run directory from LLMCTL_RUN_DIR and LLMCTL_ATTEMPT; None if llmctl did not start the trainer.

        Raises:
            ValueError: LLMCTL_ATTEMPT is not a number above 0.
        """
        path, attempt = environ.get("LLMCTL_RUN_DIR"), environ.get("LLMCTL_ATTEMPT", "1")
        if not path:
            return None
        if not attempt.isdigit() or int(attempt) < 1:
            raise ValueError(f"LLMCTL_ATTEMPT={attempt} is not a number above 0; unset it")
        return cls(Path(path), int(attempt))

    @property
    def attempt_dir(self) -> Path:
        """Folder of this attempt."""
        return self.path / "attempts" / str(self.attempt)

    @property
    def metrics(self) -> Path:
        """Metrics file of all attempts: one JSON object per logged iteration."""
        return self.path / "metrics.jsonl"

    @property
    def saved(self) -> Path:
        """Record of the newest saved checkpoint, see trainer.config.records.saved_progress."""
        return self.path / SAVED

    @property
    def lock(self) -> Path:
        """Folder with the process that trains in this directory; trainer.process.run_lock writes it."""
        return self.path / "lock"

    @property
    def checkpoints(self) -> Path:
        """Default folder of checkpoints, used if checkpoint.save is unset."""
        return self.path / "checkpoints"

    @property
    def stop_request(self) -> Path:
        """File whose existence asks the run to save and exit."""
        return self.attempt_dir / "stop"

    @property
    def outcome(self) -> Path:
        """File that global rank 0 writes just before a normal exit."""
        return self.attempt_dir / "outcome.json"

    @property
    def preflight(self) -> Path:
        """Facts and findings of the preflight, which global rank 0 writes."""
        return self.attempt_dir / "preflight.json"

    @property
    def reserve(self) -> Path:
        """File of the supervisor that is removed to make room for records on a full disk."""
        return self.attempt_dir / ".reserve"

    def rank_log(self, rank: int) -> Path:
        """Log file of one rank."""
        return self.attempt_dir / f"rank-{rank:05d}.log"

    def flight_record(self, rank: int) -> Path:
        """Newest collectives of a rank at a hang, where NCCL writes its own, too (llmctl/supervisor/node.py)."""
        return self.attempt_dir / "flight" / f"rank_{rank}"

    @property
    def profiles(self) -> Path:
        """Folder of the attempt's profiles, one for each profiled rank; see trainer.training.profile."""
        return self.attempt_dir / "profile"

    def heartbeat(self, rank: int) -> Path:
        """Heartbeat file of one rank."""
        return self.attempt_dir / "heartbeat" / f"rank-{rank:05d}.json"

    def error(self, rank: int) -> Path:
        """Failure record of one rank."""
        return self.attempt_dir / "errors" / f"rank-{rank:05d}.json"


def write_json(path: Path, values: Mapping[str, Any], *, durable: bool = False) -> None:
    """Atomically replace ``path`` by ``values`` as JSON.

    With ``durable`` the content is on the disk before the file is renamed.

    Raises:
        OSError: the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    # Whatever the umask: a group that may read the records must not be able to replace them.
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(values, file)
            file.write("\n")
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Flush a folder's entries to disk, which a file's fsync(2) does not cover."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Where a run that llmctl started keeps its files; the names are shared with llmctl. Torch-free."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunDirectory:
    """One attempt of one run.

    Attributes:
        path: the run's directory, shared by all nodes.
        attempt: number of this attempt, counted from 1.
    """

    path: Path
    attempt: int = 1

    @classmethod
    def from_variables(cls, environ: Mapping[str, str]) -> RunDirectory | None:
        """From LLMCTL_RUN_DIR and LLMCTL_ATTEMPT; None where the trainer runs by itself.

        Raises:
            ValueError: LLMCTL_ATTEMPT is not a number above zero.
        """
        path, attempt = environ.get("LLMCTL_RUN_DIR"), environ.get("LLMCTL_ATTEMPT", "1")
        if not path:
            return None
        if not attempt.isdigit() or int(attempt) < 1:
            raise ValueError(f"LLMCTL_ATTEMPT={attempt} is not a number above zero")
        return cls(Path(path), int(attempt))

    @property
    def attempt_dir(self) -> Path:
        """Folder of this attempt."""
        return self.path / "attempts" / str(self.attempt)

    @property
    def metrics(self) -> Path:
        """One JSON object per logged iteration, over all attempts."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go unless checkpoint.save says otherwise."""
        return self.path / "checkpoints"

    @property
    def stop_request(self) -> Path:
        """Exists once the run is asked to save and leave."""
        return self.attempt_dir / "stop"

    @property
    def outcome(self) -> Path:
        """Written by global rank 0 just before it leaves in good order."""
        return self.attempt_dir / "outcome.json"

    def rank_log(self, rank: int) -> Path:
        """Output of one rank."""
        return self.attempt_dir / f"rank-{rank:05d}.log"

    def heartbeat(self, rank: int) -> Path:
        """Last sign of life of one rank."""
        return self.attempt_dir / "heartbeat" / f"rank-{rank:05d}.json"

    def error(self, rank: int) -> Path:
        """Why one rank failed."""
        return self.attempt_dir / "errors" / f"rank-{rank:05d}.json"


def write_json(path: Path, values: Mapping[str, Any], *, durable: bool = False) -> None:
    """Replace ``path`` by ``values`` at one instant, so that no reader ever sees half of it.

    With ``durable`` the content has reached the disk before the name points to it.

    Raises:
        OSError: the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
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
    """Bring the names in a folder to the disk (fsync(2): a file's own fsync does not cover its directory entry)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

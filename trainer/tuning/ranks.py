"""The ranks of one trial on this node: started as an agent of torchrun starts them, and ended together. Torch-free."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROGRAM = Path(__file__).parents[1]
"""Folder of the trainer: another package of this name may be on Python's path."""


@dataclass(frozen=True)
class Place:
    """This node among the nodes of the job.

    Attributes:
        node: its number.
        nodes: number of nodes.
        ranks: of each node.
        address: of the head node, which all ranks reach.
    """

    node: int
    nodes: int
    ranks: int
    address: str

    def variables(self, local_rank: int, port: int) -> dict[str, str]:
        """Variables of a rank. Under TORCHELASTIC_RUN_ID it takes these and not those of the job's launcher."""
        return {
            "RANK": str(self.node * self.ranks + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.nodes * self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": f"tune-{port}",
        }


class Ranks:
    """Processes of the ranks of this node."""

    def __init__(self, place: Place, config: Path, folder: Path, port: int, environment: Mapping[str, str]) -> None:
        """Start them.

        Args:
            place: of this node.
            config: file with the training config.
            folder: run directory of the trial, on a file system that all nodes see.
            port: of the head node, free.
            environment: of this process.
        """
        command = [sys.executable, str(_PROGRAM), "pretrain", "--config", str(config)]
        own = {**environment, "LLMCTL_RUN_DIR": str(folder), "LLMCTL_ATTEMPT": "1"}
        log = folder / f"node-{place.node:05d}.log"
        with log.open("wb") as output:
            self._processes = [
                subprocess.Popen(
                    command,
                    env={**own, **place.variables(local_rank, port)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for local_rank in range(place.ranks)
            ]

    def codes(self) -> list[int | None]:
        """Exit code of each rank, the negative number of a signal; None: it runs."""
        return [process.poll() for process in self._processes]

    def end(self) -> None:
        """Kill all that still run, with their children, and wait for them."""
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()

"""job.json: the values of one submission that the supervisor needs. It holds no secret."""

import json
import os
from typing import Any, NamedTuple, Optional, Tuple


class JobSettings(NamedTuple):
    """Content of job.json.

    Attributes:
        run_id: of the run.
        run_dir: its directory.
        submission: number of this submission of the run.
        nodes: nodes of the job.
        ranks_per_node: ranks of each node.
        is_training: False for a COMMAND.
        one_process_per_rank: the launcher starts each rank; otherwise one process per node.
        ports: first and last port that the ranks may meet at.
        port_rule: base and modulus of the site's own rule; None where it has none.
        stop_grace_s: seconds that ranks get to save once they are told to stop.
        stop_after_s: seconds after which they are told; 0: never.
        secrets_file: where the values of secrets are; None without secrets.
        secrets_are_read_once: the first process reads them for all, and removes the file at once.
        hosts: where job.sh is started on each machine: their names; empty where a scheduler starts it once.
        shared: those machines see one run directory.
        in_image: the ranks run in a container.
        forgets_launchers: variables of an allocation that llmctl itself runs in are none of the job's.
    """

    run_id: str
    run_dir: str
    submission: int
    nodes: int
    ranks_per_node: int
    is_training: bool
    one_process_per_rank: bool
    ports: Tuple[int, int]
    port_rule: Optional[Tuple[int, int]]
    stop_grace_s: int
    stop_after_s: int
    secrets_file: Optional[str]
    secrets_are_read_once: bool
    hosts: Tuple[str, ...]
    shared: bool
    in_image: bool
    forgets_launchers: bool

    @classmethod
    def read(cls, path: str) -> "JobSettings":
        """The settings in a file.

        Raises:
            OSError: it cannot be read.
            ValueError, TypeError: it is not job.json of this version.
        """
        with open(path, "rb") as file:
            values = json.loads(file.read().decode("utf-8", "surrogateescape"))
        return cls(**{name: _native(value) for name, value in values.items()})

    def attempt_dir(self, attempt: int) -> str:
        """Directory of an attempt."""
        return f"{self.run_dir}/attempts/{attempt}"


def _native(value: Any) -> Any:
    """Text as this Python names files; lists as tuples.

    The encoding of file names may be ASCII: Python 3.6 in the C locale.
    """
    if isinstance(value, str):
        return os.fsdecode(value.encode("utf-8", "surrogateescape"))
    if isinstance(value, list):
        return tuple(_native(one) for one in value)
    return value

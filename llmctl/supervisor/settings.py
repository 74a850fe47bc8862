"""job.json: the values of one submission that the supervisor needs, without secrets."""

import json
import os
from typing import Any, NamedTuple, Optional, Tuple


class ChainSettings(NamedTuple):
    """Values by which the end of a job hands the run's next job to the scheduler.

    Attributes:
        argv: the submit command, run in the run directory.
        time_s: time limit of a job, in seconds; 0: the site's default.
        until: iteration with whose checkpoint the chain ends; 0: the end of the training.
        points: most points that all jobs of the run may use; None: no limit.
        node_hours: most node-hours that they may use; None: no limit.
    """

    argv: Tuple[str, ...]
    time_s: int
    until: int = 0
    points: Optional[float] = None
    node_hours: Optional[float] = None


class JobSettings(NamedTuple):
    """Content of job.json.

    Attributes:
        run_id: of the run.
        run_dir: directory of the run.
        submission: number of this submission of the run.
        nodes: nodes that an attempt trains on.
        ranks_per_node: ranks of each node.
        is_training: False for a COMMAND.
        one_process_per_rank: the launcher starts each rank; otherwise one process per node.
        ports: first and last port for the rendezvous.
        port_rule: base and modulus of the site's own rule; None without a rule.
        stop_grace_s: seconds that ranks get to save after a stop request.
        stop_after_s: seconds until the stop request; 0 disables the request.
        secrets_file: file with the values of secrets; None without secrets.
        secrets_are_read_once: the first process reads the secrets for all processes and removes the file at once.
        hosts: names of the machines if job.sh starts on each machine; empty if a scheduler starts job.sh once.
        shared: all machines see one run directory.
        in_image: the ranks run in a container.
        forgets_launchers: remove the variables of an allocation that llmctl itself runs in.
        notify: places of notices (see notices.py).
        notify_on: events that are told there.
        points_per_node_hour: price of a node in the site's points, for trackers; None: the site has none, or unknown.
        points_unit: name of the points.
        max_restarts: how often a failed attempt begins again in this job.
        restart_on: classes of failures after which an attempt begins again (see restarts.py).
        hang_timeout_s: seconds for which a hang lasts before the attempt ends; 0: for ever.
        chain: of a run whose jobs hand it to the next one; None: the run ends with its job.
        copy_folder: folder with copies of the training's state on each node; empty without.
        spare_nodes: further nodes of the job, which take the place of nodes at fault (see spares/choice.py).
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
    notify: Tuple[str, ...] = ()
    notify_on: Tuple[str, ...] = ()
    points_per_node_hour: Optional[float] = None
    points_unit: str = ""
    max_restarts: int = 0
    restart_on: Tuple[str, ...] = ()
    hang_timeout_s: float = 0
    chain: Optional[ChainSettings] = None
    spare_nodes: int = 0
    copy_folder: str = ""

    @classmethod
    def read(cls, path: str) -> "JobSettings":
        """Read the settings from a file.

        Raises:
            OSError: the file cannot be read.
            ValueError, TypeError: the file is not a job.json of this version.
        """
        with open(path, "rb") as file:
            values = json.loads(file.read().decode("utf-8", "surrogateescape"))
        native = _native(values)
        if native.get("chain") is not None:
            native["chain"] = ChainSettings(**native["chain"])
        return cls(**native)

    @property
    def may_begin_again(self) -> bool:
        """True if a failed attempt may begin again; several machines tell each other through one run directory."""
        return self.max_restarts > 0 and (not self.hosts or self.shared or self.nodes == 1)

    def attempt_dir(self, attempt: int) -> str:
        """Directory of an attempt."""
        return f"{self.run_dir}/attempts/{attempt}"


def _native(value: Any) -> Any:
    """Text in this Python's file name encoding; lists as tuples, also within objects.

    The encoding may be ASCII: Python 3.6 in the C locale.
    """
    if isinstance(value, str):
        return os.fsdecode(value.encode("utf-8", "surrogateescape"))
    if isinstance(value, list):
        return tuple(_native(one) for one in value)
    if isinstance(value, dict):
        return {name: _native(one) for name, one in value.items()}
    return value

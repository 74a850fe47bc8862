"""What a scheduler with a queue is asked on top: status, accounting, nodes. Pure, like llmctl.backends.base."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from llmctl.backends.base import Backend, HostCommand, SubmittedJob
from llmctl.job_state import JobState


@dataclass(frozen=True)
class JobStatus:
    """One job as its scheduler sees it.

    Attributes:
        state: the neutral word.
        raw: the scheduler's own word.
        reason: why it waits or ended, in the scheduler's words; empty if it says nothing.
        nodes: names of the nodes it runs on, as far as they are known.
        exit_code: exit status of the job once it has ended and the scheduler tells.
    """

    state: JobState
    raw: str
    reason: str = ""
    nodes: tuple[str, ...] = ()
    exit_code: int | None = None


@dataclass(frozen=True)
class NodeStatus:
    """One node as its scheduler sees it: name, neutral state, the scheduler's word, why it is down, and its GPUs."""

    name: str
    state: str
    raw: str
    reason: str = ""
    gpus: int | None = None
    memory_gib: float | None = None


class QueueBackend(Backend, Protocol):
    """What a backend answers on top where a scheduler keeps a queue, accounting and a list of nodes.

    Elsewhere a job is a process: llmctl.processes tells whether it lives, and ends it.
    """

    def status_argv(self, job_ids: Sequence[str]) -> list[str]:
        """One query for all the jobs."""

    def parse_status(self, output: str) -> dict[str, JobStatus]:
        """Job id -> status. A job that is not there is not concluded to be gone."""

    def accounting_argv(self, job_ids: Sequence[str]) -> list[str]:
        """One query for the jobs that the queue has forgotten."""

    def parse_accounting(self, output: str) -> dict[str, JobStatus]:
        """Job id -> final status."""

    def cancel_commands(self, jobs: Sequence[SubmittedJob]) -> list[HostCommand]:
        """Commands that ask the scheduler to end the jobs."""

    def nodes_argv(self) -> list[str]:
        """One query for all nodes."""

    def parse_nodes(self, output: str) -> list[NodeStatus]:
        """State of every node."""

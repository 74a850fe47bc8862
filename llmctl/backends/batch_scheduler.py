"""Answers that batch schedulers have in common; a backend with a queue overrides those that differ."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from llmctl.backends.base import Capabilities, HostCommand, JobRequest


@dataclass(frozen=True)
class ErrorMessages:
    """Meaning of a scheduler's error messages, as regular expressions.

    Attributes:
        transient: the command may succeed a little later.
        not_taken: a submission was surely not accepted: nothing was sent, or the server refused.
        perhaps_taken: the submission may have been accepted all the same; outweighs ``not_taken``.
        advice: (pattern, one sentence of advice); the first match counts.
    """

    transient: str
    not_taken: str
    perhaps_taken: str
    advice: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class BatchScheduler(ABC):
    """Base of the backends with a queue, see QueueBackend."""

    messages: ErrorMessages
    job_keys: frozenset[str] = frozenset(
        {
            *("name", "nodes", "gpus_per_node", "time", "group", "resource_type", "queue", "reservation", "priority"),
            *("after", "container", "mounts", "launcher", "env", "secrets", "code"),
        }
    )
    launchers: tuple[str, ...] = ("torchrun", "mpirun")
    capabilities: Capabilities = Capabilities(has_queue=True)
    tells_ends_apart: bool = True

    @abstractmethod
    def submit_commands(self, request: JobRequest) -> list[HostCommand]:
        """See Backend."""

    def next_job_argv(self, request: JobRequest) -> tuple[str, ...]:
        """The command by which llmctl submits a job."""
        (command,) = self.submit_commands(request)
        return command.argv

    def priority_problem(self, priority: int) -> str:
        """Empty for any priority: the submit command itself refuses those that are not allowed."""
        del priority
        return ""

    def options_problem(self, options: Sequence[str]) -> str:
        """Empty for any options: a profile may have any directive."""
        del options
        return ""

    def is_transient(self, exit_status: int, stderr: str) -> bool:
        """True if the server was unreachable or overloaded."""
        return exit_status != 0 and re.search(self.messages.transient, stderr) is not None

    def was_not_taken(self, exit_status: int, stderr: str) -> bool:
        """True if nothing was sent, or the server refused; one message in doubt outweighs all others."""
        if exit_status == 0 or re.search(self.messages.perhaps_taken, stderr):
            return False
        return re.search(self.messages.not_taken, stderr) is not None

    def advice(self, stderr: str) -> str:
        """Advice for the refusals that users meet."""
        return next((advice for pattern, advice in self.messages.advice if re.search(pattern, stderr)), "")

"""The ``local`` cluster: this machine. No queue and no accounting; job.sh itself starts one agent per node.

A job's id is the process id of its job.sh. The kernel reuses process ids, so llmctl signals no process by id alone:
llmctl.transport.processes finds and ends the processes of a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llmctl.backends.base import Capabilities, HostCommand, JobRequest, ProfileHints, parse_process_id

HOST = "localhost"


@dataclass(frozen=True)
class LocalBackend:
    """Backend for jobs that are processes of this machine."""

    name: str = "local"
    template: str = "local.sh.j2"
    job_keys: frozenset[str] = frozenset(
        {"name", "nodes", "gpus_per_node", "time", "group", "launcher", "env", "secrets", "code"}
    )
    launchers: tuple[str, ...] = ("torchrun",)
    capabilities: Capabilities = Capabilities(has_queue=False)

    def profile_hints(self) -> ProfileHints:
        """No hints: one machine has one kind of node and one launcher, and bills nobody."""
        return ProfileHints()

    def submit_commands(self, request: JobRequest) -> list[HostCommand]:
        """Command for job.sh, to be started detached from the terminal."""
        return [HostCommand(HOST, ("bash", f"{request.run_dir}/job.sh"))]

    def parse_job_id(self, output: str) -> str:
        """Process id of the started job.sh."""
        return parse_process_id(output)

    def interactive_argv(self, request: JobRequest, script: str, command: Sequence[str]) -> list[str]:
        """Bash with the script on its command line, so that the terminal stays free."""
        del request
        return ["bash", "-c", script, "bash", *command]


BACKEND = LocalBackend()

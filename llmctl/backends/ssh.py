"""Machines behind ssh, without a scheduler: llmctl starts job.sh on each of them, which runs that node's part of a job.

As on the ``local`` cluster, a job's id is the process id of its job.sh, on its host. llmctl.submit.start_ssh starts the
hosts together, and llmctl.transport.host_group combines them into one transport.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llmctl.backends.base import Capabilities, HostCommand, JobRequest, ProfileHints, parse_process_id


@dataclass(frozen=True)
class SshBackend:
    """Backend for jobs that are processes of several machines."""

    name: str = "ssh"
    template: str = "ssh.sh.j2"
    job_keys: frozenset[str] = frozenset(
        {
            *("name", "nodes", "gpus_per_node", "time", "group", "resource_type", "exclude", "launcher"),
            *("container", "mounts", "env", "secrets", "code"),
        }
    )
    launchers: tuple[str, ...] = ("torchrun", "mpirun")
    capabilities: Capabilities = Capabilities(has_queue=False, starts_on_hosts=True, mpirun_carries_environment=False)

    def profile_hints(self) -> ProfileHints:
        """Hints without a group: nobody is billed."""
        return ProfileHints(
            node_types="GPUs of each machine.",
            example_type="{gpus: 8, gpu: A100}",
            launchers="torchrun   # or mpirun, which needs ssh from the first machine to the others",
        )

    def submit_commands(self, request: JobRequest) -> list[HostCommand]:
        """One job.sh with its node number per host, the head first; with mpirun only the head's."""
        script = f"{request.run_dir}/job.sh"
        hosts = request.hosts
        if request.launcher == "mpirun":
            return [HostCommand(hosts[0], ("bash", script))]
        return [HostCommand(host, ("bash", script, str(node))) for node, host in enumerate(hosts)]

    def parse_job_id(self, output: str) -> str:
        """Process id of the started job.sh."""
        return parse_process_id(output)

    def interactive_argv(self, request: JobRequest, script: str, command: Sequence[str]) -> list[str]:
        """Bash on the host, with the script on its command line, so that the terminal stays free."""
        del request
        return ["bash", "-c", script, "bash", *command]


BACKEND = SshBackend()

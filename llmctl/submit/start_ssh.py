"""Starting a run on several hosts without a scheduler: on all of them, or on none.

The head is started first: its job.sh settles where the ranks meet, and says so in attempts/K/rendezvous. Then the
others are started, all at once, and each has to say in its started-NNNNN.json that it has begun. Whatever goes wrong on
one host, what was started is ended again and nothing is left.
"""

import time
from collections.abc import Mapping, Sequence

from llmctl.backends.base import HostCommand, JobRequest, SubmittedJob
from llmctl.errors import LlmctlError, SchedulerError, SubmissionLost
from llmctl.site.profile import ClusterProfile
from llmctl.transport.file_reads import FileRead
from llmctl.transport.file_writes import FileWrite
from llmctl.transport.host_group import HostGroup
from llmctl.transport.host_members import bare
from llmctl.transport.processes import ProcessIdentity
from llmctl.transport.protocol import Transport
from llmctl.transport.ssh.failures import ConnectionLost
from llmctl.transport.ssh.ssh_config import resolve

HEAD_PATIENCE_S = 300.0
"""For the head to load its environment and choose a port: modules on a busy network file system take minutes."""
BEGIN_PATIENCE_S = 60.0
"""For a job.sh that was started to have begun: bash, two small files, and a network file system's caches (nfs(5):
acdirmax, 60 s)."""
_POLL_S = (0.1, 1.0)
_LOG_TAIL = 2000


def start_on_group(
    commands: Sequence[HostCommand],
    run_dir: str,
    attempt: int,
    group: HostGroup,
    *,
    in_container: bool,
    peer: str | None,
) -> tuple[SubmittedJob, ...]:
    """Start job.sh on each host; returns once all of them have begun.

    Args:
        commands: one per host, the head first.
        run_dir: the run directory, complete on all hosts.
        attempt: the number that job.sh will give the attempt.
        group: the hosts of the run.
        in_container: the head may fetch an image before it chooses a port; each host then waits for itself.
        peer: address that the head is to reach the second host at; None: the name of the host.

    Raises:
        SchedulerError: it could not be started everywhere; names the host. What had been started is ended.
    """
    start = _Start(commands, run_dir, attempt, group, in_container)
    try:
        if peer is not None and len(commands) > 1:
            group.write_files([FileWrite(f"{run_dir}/second-host", f"{peer}\n".encode())])
        return start.run()
    except (LlmctlError, OSError, KeyboardInterrupt) as error:
        start.undo(error)
        raise


def address_of_second(profile: ClusterProfile, request: JobRequest, environment: Mapping[str, str]) -> str | None:
    """Where the second host is, by our own ssh configuration: its name there may be known to nobody else.

    None where the head needs none: one node, an interface named by the profile, or mpirun, which has to know names.

    Args:
        profile: of the cluster.
        request: of the job.
        environment: of the ssh client.

    Raises:
        SchedulerError: the ssh configuration cannot be read.
    """
    if request.nodes == 1 or profile.rendezvous.interface is not None or request.launcher == "mpirun":
        return None
    return resolve(profile.hosts[1], environment).hostname


class _Start:
    """One start: the jobs that have been started so far, and the hosts where one may have been."""

    def __init__(
        self, commands: Sequence[HostCommand], run_dir: str, attempt: int, group: HostGroup, in_container: bool
    ) -> None:
        self._commands = {command.host: command for command in commands}
        self._nodes = {command.host: node for node, command in enumerate(commands)}
        self._run_dir = run_dir
        self._attempt_dir = f"{run_dir}/attempts/{attempt}"
        self._group = group
        self._in_container = in_container
        self._touched: set[str] = set()
        self._jobs: dict[str, SubmittedJob] = {}

    def run(self) -> tuple[SubmittedJob, ...]:
        head, *others = self._commands
        self._start(head, self._group.transport_of(head))
        self._wait_for_beginning(head)
        if others:
            self._meet(head, others)
            self._group.on_each(others, self._start)
            for host in others:
                self._wait_for_beginning(host)
        return tuple(self._jobs[host] for host in self._commands)

    def undo(self, cause: BaseException) -> None:
        """End what was started; nothing is left but what could not be reached."""
        if not self._touched:
            return
        leaders = [_identity(job) for job in self._jobs.values()]
        try:
            left = self._group.on_each(
                sorted(self._touched), lambda _, transport: transport.end_run(self._run_dir, leaders, grace_s=0)
            )
            problem = "; ".join(
                f"{len(some)} processes on {host} could not be ended" for host, some in left.items() if some
            )
            self._group.remove([self._attempt_dir])
        except SchedulerError as error:
            problem = bare(error)
        if problem:
            run_id = self._run_dir.rpartition("/")[2]
            why = bare(cause) if isinstance(cause, SchedulerError) else str(cause) or type(cause).__name__
            raise SubmissionLost(
                f"{run_id}: not started everywhere: {why}; what had been started may still run: {problem}\n"
                f"llmctl cancel {run_id} ends it",
                transient=True,
            ) from None

    def _start(self, host: str, transport: Transport) -> None:
        node = self._nodes[host]
        log = f"{self._run_dir}/job{f'-{node:05d}' if node else ''}.log"
        self._touched.add(host)
        try:
            identity = transport.start_detached(self._commands[host].argv, cwd=self._run_dir, log=log)
        except ConnectionLost:
            raise  # it may have been started
        except (SchedulerError, OSError) as error:
            self._touched.discard(host)
            why = bare(error) if isinstance(error, SchedulerError) else error.strerror or str(error)
            transient = isinstance(error, SchedulerError) and error.transient
            raise SchedulerError(
                f"{host}: job.sh cannot be started: {why}{self._hint(why)}", transient=transient
            ) from None
        self._jobs[host] = SubmittedJob(host, str(identity.pid), identity.pid, identity.start_time, identity.boot_id)

    def _hint(self, why: str) -> str:
        if "No such file" not in why or not self._group.shared:
            return ""
        root = self._run_dir.rpartition("/")[0]
        return f"\nis {root} one folder that all hosts see? If not, the profile says shared: false"

    def _meet(self, head: str, others: Sequence[str]) -> None:
        """Wait until the head has settled where the ranks meet, and take that to hosts that cannot see it."""
        if self._in_container and self._group.shared:
            return  # fetching the image may take long; each host waits for itself
        path = f"{self._attempt_dir}/rendezvous"
        data = self._wait_for_file(head, path, HEAD_PATIENCE_S, "has not said where the ranks meet")
        if not self._group.shared:
            self._group.on_each(others, lambda _, transport: transport.write_files([FileWrite(path, data)]))

    def _wait_for_beginning(self, host: str) -> None:
        node = self._nodes[host]
        path = f"{self._attempt_dir}/started{f'-{node:05d}' if node else ''}.json"
        self._wait_for_file(host, path, BEGIN_PATIENCE_S, "job.sh has not begun")

    def _wait_for_file(self, host: str, path: str, patience_s: float, what: str) -> bytes:
        """The content of a file that a host's job.sh writes.

        Raises:
            SchedulerError: the job.sh has ended without it, or it does not come in time.
        """
        transport, job = self._group.transport_of(host), self._jobs[host]
        deadline, pause_s = time.monotonic() + patience_s, _POLL_S[0]
        while True:
            # First whether it lives: what it wrote before it ended is seen.
            (lives,) = transport.inspect_processes([_identity(job)]).alive
            (part,) = transport.read_parts([FileRead(path, limit=4096)])
            if part is not None and part.data:
                return part.data
            if lives is False:
                raise SchedulerError(
                    f"{host}: job.sh ended at once: {self._last_words(host, transport)}", transient=False
                )
            if time.monotonic() > deadline:
                raise SchedulerError(f"{host}: {what} after {patience_s:.0f} s", transient=True)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])

    def _last_words(self, host: str, transport: Transport) -> str:
        node = self._nodes[host]
        paths = [f"{self._attempt_dir}/node-{node:05d}.log", f"{self._run_dir}/job{f'-{node:05d}' if node else ''}.log"]
        for part in transport.read_parts([FileRead(path, -_LOG_TAIL, _LOG_TAIL) for path in paths]):
            text = part.data.decode(errors="replace").strip() if part is not None else ""
            if text:
                return " | ".join(text.splitlines()[-3:])
        return "it left no word"


def _identity(job: SubmittedJob) -> ProcessIdentity:
    assert job.pid is not None
    return ProcessIdentity(job.pid, job.pid_start_time, job.boot_id)

"""Start of a run on several hosts without a scheduler: on all hosts, or on none.

The head node starts first: its job.sh chooses the rendezvous and writes attempts/K/rendezvous. Then the other hosts
start, all at once, and each host must write its started-NNNNN.json. If one host fails, all started processes are ended
and their files removed.
"""

import time
from collections.abc import Mapping, Sequence

from llmctl.backends.base import HostCommand, JobRequest, SubmittedJob
from llmctl.errors import LlmctlError, SchedulerError, SubmissionLost
from llmctl.transport.file_reads import FileRead
from llmctl.transport.file_writes import FileWrite
from llmctl.transport.host_group import HostGroup
from llmctl.transport.host_members import bare
from llmctl.transport.processes import ProcessIdentity
from llmctl.transport.protocol import Transport
from llmctl.transport.ssh.failures import ConnectionLost
from llmctl.transport.ssh.ssh_config import resolve

HEAD_TIMEOUT_S = 300.0
"""For the head node to load its environment and choose a port: modules on a busy file system take minutes."""
BEGIN_TIMEOUT_S = 60.0
"""For a started job.sh to write started.json: bash, two small files, and a network file system's caches (nfs(5):
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
    """Start job.sh on each host; returns after all have written started.json.

    Args:
        commands: one per host, the head first.
        run_dir: the run directory, complete on all hosts.
        attempt: number of the attempt, which each job.sh is told; with mpirun the head node finds it itself.
        group: the hosts of the run.
        in_container: the head node may import an image before it chooses a port; then each host waits by itself.
        peer: address of the second host for the head node; None: the name of the host.

    Raises:
        SchedulerError: a host failed; names the host. All started processes are ended.
    """
    start = _Start(commands, run_dir, attempt, group, in_container)
    try:
        if peer is not None and len(commands) > 1:
            group.write_files([FileWrite(f"{run_dir}/second-host", f"{peer}\n".encode())])
        return start.run()
    except (LlmctlError, OSError, KeyboardInterrupt) as error:
        start.undo(error)
        raise


def address_of_second(request: JobRequest, environment: Mapping[str, str]) -> str | None:
    """Address of the second host by our own ssh configuration: only that file may know the host's name.

    None if the head node needs no address: one node, an interface in the profile, or mpirun, which needs names.

    Args:
        request: of the job.
        environment: of the ssh client.

    Raises:
        SchedulerError: the ssh configuration cannot be read.
    """
    if request.nodes == 1 or request.profile.rendezvous.interface is not None or request.launcher == "mpirun":
        return None
    return resolve(request.hosts[1], environment).hostname


class _Start:
    """One start: the jobs started so far, and the hosts where a job may have started."""

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
        self._wait_for_start(head)
        if others:
            self._share_rendezvous(head, others)
            self._group.on_each(others, self._start)
            for host in others:
                self._wait_for_start(host)
        return tuple(self._jobs[host] for host in self._commands)

    def undo(self, cause: BaseException) -> None:
        """End all started processes and remove the attempt, except on unreachable hosts."""
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
                f"{run_id}: not started on all hosts: {why}; started processes may still run: {problem}\n"
                f"llmctl cancel {run_id} ends them",
                transient=True,
            ) from None

    def _start(self, host: str, transport: Transport) -> None:
        node = self._nodes[host]
        log = f"{self._run_dir}/job{f'-{node:05d}' if node else ''}.log"
        self._touched.add(host)
        try:
            identity = transport.start_detached(self._argv(host), cwd=self._run_dir, log=log)
        except ConnectionLost:
            raise  # job.sh may have started
        except (SchedulerError, OSError) as error:
            self._touched.discard(host)
            why = bare(error) if isinstance(error, SchedulerError) else error.strerror or str(error)
            transient = isinstance(error, SchedulerError) and error.transient
            raise SchedulerError(
                f"{host}: job.sh cannot be started: {why}{self._hint(why)}", transient=transient
            ) from None
        self._jobs[host] = SubmittedJob(host, str(identity.pid), identity.pid, identity.start_time, identity.boot_id)

    def _argv(self, host: str) -> tuple[str, ...]:
        """Command of a host. The words NODE and ATTEMPT follow job.sh; with mpirun there is neither."""
        argv = tuple(self._commands[host].argv)
        return (*argv, self._attempt_dir.rpartition("/")[2]) if argv[2:] else argv

    def _hint(self, why: str) -> str:
        if "No such file" not in why or not self._group.shared:
            return ""
        root = self._run_dir.rpartition("/")[0]
        return f"\nis {root} one folder that all hosts see? If not, set shared: false in the profile"

    def _share_rendezvous(self, head: str, others: Sequence[str]) -> None:
        """Wait for the head node's rendezvous file, and copy the file to hosts that do not share its folder."""
        if self._in_container and self._group.shared:
            return  # importing the image may take long; each host waits by itself
        path = f"{self._attempt_dir}/rendezvous"
        data = self._wait_for_file(head, path, HEAD_TIMEOUT_S, "has not written the rendezvous file")
        if not self._group.shared:
            self._group.on_each(others, lambda _, transport: transport.write_files([FileWrite(path, data)]))

    def _wait_for_start(self, host: str) -> None:
        node = self._nodes[host]
        path = f"{self._attempt_dir}/started{f'-{node:05d}' if node else ''}.json"
        self._wait_for_file(host, path, BEGIN_TIMEOUT_S, "job.sh has not written started.json")

    def _wait_for_file(self, host: str, path: str, patience_s: float, what: str) -> bytes:
        """Wait for a file that a host's job.sh writes; returns its content.

        Raises:
            SchedulerError: job.sh has ended without the file, or the time is over.
        """
        transport, job = self._group.transport_of(host), self._jobs[host]
        deadline, pause_s = time.monotonic() + patience_s, _POLL_S[0]
        while True:
            # Check the process before the file: a file written just before the end is then still read.
            (lives,) = transport.inspect_processes([_identity(job)]).alive
            (part,) = transport.read_parts([FileRead(path, limit=4096)])
            if part is not None and part.data:
                return part.data
            if lives is False:
                raise SchedulerError(
                    f"{host}: job.sh ended at once: {self._log_tail(host, transport)}", transient=False
                )
            if time.monotonic() > deadline:
                raise SchedulerError(f"{host}: {what} after {patience_s:.0f} s", transient=True)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])

    def _log_tail(self, host: str, transport: Transport) -> str:
        node = self._nodes[host]
        paths = [f"{self._attempt_dir}/node-{node:05d}.log", f"{self._run_dir}/job{f'-{node:05d}' if node else ''}.log"]
        for part in transport.read_parts([FileRead(path, -_LOG_TAIL, _LOG_TAIL) for path in paths]):
            text = part.data.decode(errors="replace").strip() if part is not None else ""
            if text:
                return " | ".join(text.splitlines()[-3:])
        return "its logs are empty"


def _identity(job: SubmittedJob) -> ProcessIdentity:
    assert job.pid is not None
    return ProcessIdentity(job.pid, job.pid_start_time, job.boot_id)

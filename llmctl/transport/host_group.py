"""Transport of a cluster that is a list of machines: several hosts as one, each with a connection of its own.

With a shared file system (``shared``), files are read and written through one host, the first that answers. Without a
shared file system every host has its own run directory: writes go to all hosts, and reads come from the first host that
has the file. Calls about processes go to all hosts in both cases.

A change never silently skips an unreachable host, and the processes of an unreachable host are unknown.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar, cast

from llmctl.errors import SchedulerError
from llmctl.paths import expand
from llmctl.terminal_text import printable
from llmctl.transport.file_reads import FilePart, FileRead
from llmctl.transport.file_writes import FileWrite, PathFacts
from llmctl.transport.host_members import (
    HostMember,
    WatchedTransport,
    alive_anywhere,
    ask_each,
    ask_named,
    bare,
    common_facts,
    joined,
    short_name,
)
from llmctl.transport.processes import ProcessIdentity, ProcessReport
from llmctl.transport.protocol import CommandResult, Transport

T = TypeVar("T")


class HostGroup:
    """Transport on several hosts (see llmctl.transport.protocol).

    ``run``, ``run_interactive`` and ``start_detached`` act on one host: the first that answers. For a given host see
    ``transport_of``.

    Attributes:
        hosts: names from the profile, the head first.
    """

    is_remote = True

    def __init__(
        self,
        transport: Mapping[str, Transport],
        *,
        shared: bool = True,
        runs_root: str | None = None,
        warning: Callable[[str], None] | None = None,
    ) -> None:
        """Group the transports of the hosts.

        Args:
            transport: host -> its transport, the head first.
            shared: True if ``runs_root`` is one folder that all hosts see.
            runs_root: that folder; writes to other places, such as the home directory, go to every host.
            warning: called with each warning. Unset: prints a line on standard error.
        """
        self.hosts = tuple(transport)
        self._members = {host: HostMember(host, one) for host, one in transport.items()}
        self._shared = shared
        self._runs_root = runs_root
        self._chosen: HostMember | None = None
        self._warning = warning or _say

    @property
    def host(self) -> str:
        """Names of the hosts for messages."""
        return self.hosts[0] if len(self.hosts) == 1 else f"{self.hosts[0]} and {len(self.hosts) - 1} more"

    @property
    def shared(self) -> bool:
        """True if all hosts see the same run directory."""
        return self._shared

    def transport_of(self, host: str) -> Transport:
        """Transport on one host; on all hosts if the name is unknown, because a machine may use another name."""
        member = self._members.get(host)
        return cast("Transport", WatchedTransport(member)) if member is not None else self

    def called(self, name: str) -> Transport:
        """Transport on the host with this name in the profile or on the machine.

        Raises:
            SchedulerError: no reachable host has this name.
        """
        for host in self.hosts:
            if name in (host, host.rpartition("@")[2]):
                return self.transport_of(host)
        reports, problems = self._gather(lambda transport: transport.inspect_processes([]))
        found = next((host for host, report in reports.items() if short_name(report.host) == short_name(name)), None)
        if found is not None:
            return self.transport_of(found)
        if problems:
            raise joined(problems)
        raise SchedulerError(f"none of {', '.join(self.hosts)} has the host name {name}", transient=False)

    def only(self, hosts: Sequence[str]) -> "HostGroup":
        """Group of these hosts, in this order, over the same connections; of all hosts if none of them is known."""
        few = HostGroup({}, shared=self._shared, runs_root=self._runs_root)
        few.hosts = tuple(host for host in hosts if host in self._members) or self.hosts
        few._members = {host: self._members[host] for host in few.hosts}
        few._chosen = self._chosen if self._chosen in few._members.values() else None
        return few

    def on_each(self, hosts: Sequence[str], act: Callable[[str, Transport], T]) -> dict[str, T]:
        """Call ``act`` for some of the hosts, all at once; return host -> result.

        Args:
            hosts: names of the hosts.
            act: called with the host and its transport, in a thread of its own.

        Raises:
            SchedulerError: the call failed on a host; it has been made on all of them.
        """
        members = [self._members[host] for host in hosts]
        answers, problems = ask_each(members, lambda member: act(member.host, member.transport))
        if problems:
            raise joined(problems)
        return answers

    def unreachable(self) -> dict[str, SchedulerError]:
        """Connect to every host; the errors of those that cannot be reached."""
        return self._gather(lambda transport: transport.home())[1]

    # --- Calls to one host

    def home(self) -> str:
        """The user's home directory."""
        return self._look(lambda transport: transport.home())

    def variables(self, names: Sequence[str]) -> Mapping[str, str]:
        """Values of these variables on the first host that answers; see llmctl.transport.protocol."""
        return self._look(lambda transport: transport.variables(names))

    def now(self) -> float:
        """Time by the clock of the first host that answers."""
        return self._look(lambda transport: transport.now())

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        only_reads: bool = False,
    ) -> CommandResult:
        """Run a command on the first host that answers; see llmctl.transport.protocol."""
        one = self._one().transport
        return one.run(argv, timeout_s=timeout_s, cwd=cwd, env=env, stdin=stdin, only_reads=only_reads)

    def run_interactive(self, argv: Sequence[str], *, cwd: str | None = None) -> int:
        """Run a command of the first host that answers on our own terminal; see llmctl.transport.protocol."""
        return self._one().transport.run_interactive(argv, cwd=cwd)

    def start_detached(self, argv: Sequence[str], *, cwd: str, log: str) -> ProcessIdentity:
        """Start a command on the first host that answers; see llmctl.transport.protocol."""
        return self._one().transport.start_detached(argv, cwd=cwd, log=log)

    def lock(self, path: str) -> AbstractContextManager[None]:
        """Hold a lock file on the first host that answers."""
        return self._one().transport.lock(path)

    # --- Files

    def read_parts(self, reads: Sequence[FileRead]) -> list[FilePart | None]:
        """See file_reads: each part comes from the first host that has the file."""
        if self._shared:
            return self._look(lambda transport: transport.read_parts(reads))
        answers = self._answers(lambda transport: transport.read_parts(reads))
        return [next((part for part in parts if part is not None), None) for parts in zip(*answers, strict=True)]

    def list_names(self, directories: Sequence[str]) -> list[list[str]]:
        """See file_reads: the names on any of the hosts."""
        if self._shared:
            return self._look(lambda transport: transport.list_names(directories))
        answers = self._answers(lambda transport: transport.list_names(directories))
        return [sorted({name for names in group for name in names}) for group in zip(*answers, strict=True)]

    def stat_paths(self, paths: Sequence[str]) -> list[PathFacts]:
        """See file_writes: facts that hold on all hosts."""
        if self._shared:
            return self._look(lambda transport: transport.stat_paths(paths))
        answers = self._everywhere(lambda transport: transport.stat_paths(paths))
        return [common_facts(facts) for facts in zip(*answers.values(), strict=True)]

    def write_files(self, files: Sequence[FileWrite]) -> None:
        """See file_writes."""
        common = [file for file in files if self._is_common(file.path)]
        own = [file for file in files if not self._is_common(file.path)]
        if own:
            self._everywhere(lambda transport: transport.write_files(own))
        if common:
            self._one().transport.write_files(common)

    def make_folder(self, path: str, *, mode: int = 0o777, exclusive: bool = False) -> None:
        """See file_writes. With ``exclusive``, a folder that exists on any host is made on none."""
        if self._is_common(path):
            self._one().transport.make_folder(path, mode=mode, exclusive=exclusive)
            return
        made: list[HostMember] = []
        try:
            for member in self._members.values():
                ask_named(member, lambda transport: transport.make_folder(path, mode=mode, exclusive=exclusive))
                made.append(member)
        except FileExistsError:
            for member in made:
                member.transport.remove([path])
            raise

    def remove(self, paths: Sequence[str]) -> None:
        """See file_writes. Files of an unreachable host stay; the error follows after all other hosts are done."""
        common = [path for path in paths if self._is_common(path)]
        own = [path for path in paths if not self._is_common(path)]
        if common:
            self._one().transport.remove(common)
        if own:
            self._everywhere(lambda transport: transport.remove(own))

    def make_own_folder(self, runs_root: str, name: str | None = None) -> tuple[str, str]:
        """See file_writes. The folder has the same name on all hosts."""
        made, note = self._one().transport.make_own_folder(runs_root, name)
        if not self._is_common(runs_root):
            self._everywhere(lambda transport: transport.make_own_folder(runs_root, made))
        return made, note

    def why_distrusted(self, run_dir: str, contents: tuple[int, str] | None = None) -> str:
        """See llmctl.supervisor.trust; the first reason of any host."""
        if self._is_common(run_dir):
            return self._look(lambda transport: transport.why_distrusted(run_dir, contents))
        reasons = self._answers(lambda transport: transport.why_distrusted(run_dir, contents))
        return next(filter(None, reasons), "")

    def read_bad_nodes(self, runs_root: str) -> Mapping[str, Any]:
        """See llmctl.supervisor.bad_nodes.entries; of hosts without shared files, the lists of all that answer."""
        if self._is_common(runs_root):
            return self._look(lambda transport: transport.read_bad_nodes(runs_root))
        answers = self._answers(lambda transport: transport.read_bad_nodes(runs_root))
        found = sorted((one for answer in answers for one in answer["entries"]), key=lambda one: float(one["time"]))
        entries = list({one["node"]: one for one in found}.values())
        return {**answers[0], "entries": entries, "remarks": [text for one in answers for text in one["remarks"]]}

    def put_tree(self, folder: str, files: Mapping[str, Path]) -> None:
        """See llmctl.transport.protocol."""
        self._change(folder, lambda transport: transport.put_tree(folder, files))

    def link(self, links: Mapping[str, str]) -> None:
        """See file_writes."""
        for path, target in links.items():
            self._change(path, lambda transport, path=path, target=target: transport.link({path: target}))  # type: ignore[misc]

    # --- Processes

    def inspect_processes(self, identities: Sequence[ProcessIdentity]) -> ProcessReport:
        """Report which of these processes live on any host; None for one that may live on an unreachable host."""
        reports, problems = self._gather(lambda transport: transport.inspect_processes(identities))
        if not reports:
            raise next(iter(problems.values()))
        first = next(iter(reports.values()))
        alive = [
            alive_anywhere([report.alive[index] for report in reports.values()], problems)
            for index in range(len(identities))
        ]
        return ProcessReport(first.host, first.boot_id, tuple(alive))

    def processes_of_run(self, run_dir: str, leaders: Sequence[ProcessIdentity]) -> list[ProcessIdentity]:
        """Processes of a run on all hosts."""
        found = self._everywhere(lambda transport: transport.processes_of_run(run_dir, leaders))
        return [identity for identities in found.values() for identity in identities]

    def end_run(self, run_dir: str, leaders: Sequence[ProcessIdentity], *, grace_s: float) -> list[ProcessIdentity]:
        """End a run on all hosts at once.

        Raises:
            SchedulerError: a host could not be reached; the run has been ended on the others.
        """
        left = self._everywhere(lambda transport: transport.end_run(run_dir, leaders, grace_s=grace_s))
        return [identity for identities in left.values() for identity in identities]

    def close(self) -> None:
        """Close the connections to all hosts."""
        for member in self._members.values():
            member.transport.close()

    # --- Internals

    def _is_common(self, path: str) -> bool:
        """True if all hosts see the same file at this path."""
        if not self._shared:
            return False
        root = self._runs_root
        if root is not None:
            root = self._runs_root = expand(root, self)
        return root is None or path == root or path.startswith(root.rstrip("/") + "/")

    def _change(self, path: str, act: Callable[[Transport], object]) -> None:
        if self._is_common(path):
            act(self._one().transport)
        else:
            self._everywhere(act)

    def _one(self) -> "HostMember":
        """Host that answers for all: the one chosen before, otherwise the first that answers."""
        if self._chosen is None:
            self._look(lambda transport: transport.home())
        assert self._chosen is not None
        return self._chosen

    def _look(self, act: Callable[[Transport], T]) -> T:
        """Answer of the chosen host, or of another if the chosen one is unreachable."""
        first = self._chosen or self._members[self.hosts[0]]
        try:
            answer = first.ask(act)
        except SchedulerError as error:
            if not error.transient:
                raise  # such as a changed host key: no fallback
            return self._look_elsewhere(first, error, act)
        self._chosen = first
        return answer

    def _look_elsewhere(self, lost: "HostMember", problem: SchedulerError, act: Callable[[Transport], T]) -> T:
        others = [member for member in self._members.values() if member is not lost]
        answers, _ = ask_each(others, lambda member: member.ask(act))
        if not answers:
            raise problem
        host = next(iter(answers))
        self._warning(f"{printable(bare(problem))}; continuing through {host}")
        self._chosen = self._members[host]
        return answers[host]

    def _gather(self, act: Callable[[Transport], T]) -> tuple[dict[str, T], dict[str, SchedulerError]]:
        return ask_each(list(self._members.values()), lambda member: member.ask(act))

    def _answers(self, act: Callable[[Transport], T]) -> list[T]:
        """Answers of the reachable hosts, at least one."""
        answers, problems = self._gather(act)
        refused = next((error for error in problems.values() if not error.transient), None)
        if refused is not None or not answers:
            raise refused or next(iter(problems.values()))
        return list(answers.values())

    def _everywhere(self, act: Callable[[Transport], T]) -> dict[str, T]:
        """Answers of all hosts; all are called before an error of any of them is raised."""
        answers, problems = self._gather(act)
        if problems:
            raise joined(problems)
        return answers


def _say(text: str) -> None:
    print(f"llmctl: {text}", file=sys.stderr, flush=True)

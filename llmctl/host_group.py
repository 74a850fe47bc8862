"""Several hosts as one: the Hands of a cluster that is a list of machines. Each host has a connection of its own.

With one file system for all (``shared``) files are read and written through one of them, the first that answers.
Without, every host has its own run directory: what is written is written to all of them, and what is read is read from
the first that has it. Processes are everywhere in both cases.

A host that cannot be reached is never silently left out of what changes something, and says nothing about processes.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from llmctl.command_result import CommandResult
from llmctl.errors import SchedulerError
from llmctl.file_acts import FileWrite, PathFacts
from llmctl.file_reads import FilePart, FileRead
from llmctl.hands import Hands
from llmctl.processes import ProcessIdentity, ProcessReport

HOLD_OFF_S = 5.0
"""A host that could not be reached is not tried again for this long: every try takes seconds."""
_HINTS = (" (trying again later can help)", " (trying again will not help)")

T = TypeVar("T")


class HostGroup:
    """Hands on several hosts (see llmctl.hands).

    ``run``, ``run_interactive`` and ``start_detached`` act on one host: the first that answers. ``hands_of`` gives the
    hands of a certain one.

    Attributes:
        hosts: as the profile names them, the head first.
    """

    is_remote = True

    def __init__(self, hands: Mapping[str, Hands], *, shared: bool = True, runs_root: str | None = None) -> None:
        """Take the hands of each host.

        Args:
            hands: host -> its hands, the head first.
            shared: whether ``runs_root`` is one folder that all hosts see.
            runs_root: that folder; what is written elsewhere, such as below the home directory, goes to every host.
        """
        self.hosts = tuple(hands)
        self._members = {host: _Member(host, one) for host, one in hands.items()}
        self._shared = shared
        self._runs_root = runs_root
        self._chosen: _Member | None = None

    @property
    def host(self) -> str:
        """The hosts in words."""
        return self.hosts[0] if len(self.hosts) == 1 else f"{self.hosts[0]} and {len(self.hosts) - 1} more"

    @property
    def shared(self) -> bool:
        """Whether all hosts see the same run directory."""
        return self._shared

    def hands_of(self, host: str) -> Hands:
        """Hands on one host; for a name that is none of ours, which a machine may have for itself, on all of them."""
        member = self._members.get(host)
        return cast("Hands", _Watched(member)) if member is not None else self

    def called(self, name: str) -> Hands:
        """Hands on the host that the profile, or the machine itself, calls so.

        Raises:
            SchedulerError: there is none in reach.
        """
        for host in self.hosts:
            if name in (host, host.rpartition("@")[2]):
                return self.hands_of(host)
        reports, problems = self._gather(lambda hands: hands.inspect_processes([]))
        found = next((host for host, report in reports.items() if _short(report.host) == _short(name)), None)
        if found is not None:
            return self.hands_of(found)
        if problems:
            raise joined(problems)
        raise SchedulerError(f"none of {', '.join(self.hosts)} calls itself {name}", transient=False)

    def first(self, count: int) -> "HostGroup":
        """The first so many of these hosts, over the same connections."""
        few = HostGroup({}, shared=self._shared, runs_root=self._runs_root)
        few.hosts = self.hosts[:count]
        few._members = {host: self._members[host] for host in few.hosts}
        few._chosen = self._chosen if self._chosen in few._members.values() else None
        return few

    def on_each(self, hosts: Sequence[str], act: Callable[[str, Hands], T]) -> dict[str, T]:
        """What some of the hosts answer, all at once.

        Args:
            hosts: which.
            act: called with the host and its hands, in a thread of its own.

        Raises:
            SchedulerError: one failed; all have been asked.
        """
        members = [self._members[host] for host in hosts]
        answers, problems = _ask_each(members, lambda member: member.ask(lambda hands: act(member.host, hands)))
        if problems:
            raise joined(problems)
        return answers

    def check_reachable(self) -> None:
        """Reach for every host.

        Raises:
            SchedulerError: one cannot be reached; names it.
        """
        self._everywhere(lambda hands: hands.home())

    # --- One of them

    def home(self) -> str:
        """The user's home directory."""
        return self._look(lambda hands: hands.home())

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> CommandResult:
        """Run a command on the first host that answers; see llmctl.hands."""
        return self._one().hands.run(argv, timeout_s=timeout_s, cwd=cwd, env=env, stdin=stdin)

    def run_interactive(self, argv: Sequence[str], *, cwd: str | None = None) -> int:
        """Run a command of the first host that answers on our own terminal; see llmctl.hands."""
        return self._one().hands.run_interactive(argv, cwd=cwd)

    def start_detached(self, argv: Sequence[str], *, cwd: str, log: str) -> ProcessIdentity:
        """Start a command on the first host that answers; see llmctl.hands."""
        return self._one().hands.start_detached(argv, cwd=cwd, log=log)

    def lock(self, path: str) -> AbstractContextManager[None]:
        """Hold a lock file on the first host that answers."""
        return self._one().hands.lock(path)

    # --- Files

    def read_parts(self, reads: Sequence[FileRead]) -> list[FilePart | None]:
        """See file_reads: of each file what the first host that has it answers."""
        if self._shared:
            return self._look(lambda hands: hands.read_parts(reads))
        answers = self._answers(lambda hands: hands.read_parts(reads))
        return [next((part for part in parts if part is not None), None) for parts in zip(*answers, strict=True)]

    def list_names(self, directories: Sequence[str]) -> list[list[str]]:
        """See file_reads: the names that any host has."""
        if self._shared:
            return self._look(lambda hands: hands.list_names(directories))
        answers = self._answers(lambda hands: hands.list_names(directories))
        return [sorted({name for names in group for name in names}) for group in zip(*answers, strict=True)]

    def look_at(self, paths: Sequence[str]) -> list[PathFacts]:
        """See file_acts: what is there on all hosts, and can be done on all of them."""
        if self._shared:
            return self._look(lambda hands: hands.look_at(paths))
        answers = self._everywhere(lambda hands: hands.look_at(paths))
        return [_common(facts) for facts in zip(*answers.values(), strict=True)]

    def write_files(self, files: Sequence[FileWrite]) -> None:
        """See file_acts."""
        common = [file for file in files if self._is_common(file.path)]
        own = [file for file in files if not self._is_common(file.path)]
        if own:
            self._everywhere(lambda hands: hands.write_files(own))
        if common:
            self._one().hands.write_files(common)

    def make_folder(self, path: str, *, mode: int = 0o777, exclusive: bool = False) -> None:
        """See file_acts. Made on all hosts or, where it is there on one and must not be, on none."""
        if self._is_common(path):
            self._one().hands.make_folder(path, mode=mode, exclusive=exclusive)
            return
        made: list[_Member] = []
        try:
            for member in self._members.values():
                _on(member, lambda hands: hands.make_folder(path, mode=mode, exclusive=exclusive))
                made.append(member)
        except FileExistsError:
            for member in made:
                member.hands.remove([path])
            raise

    def remove(self, paths: Sequence[str]) -> None:
        """See file_acts. A host out of reach keeps what it has, and is told of once the others are done."""
        common = [path for path in paths if self._is_common(path)]
        own = [path for path in paths if not self._is_common(path)]
        if common:
            self._one().hands.remove(common)
        if own:
            self._everywhere(lambda hands: hands.remove(own))

    def put_tree(self, folder: str, files: Mapping[str, Path]) -> None:
        """See llmctl.hands."""
        self._change(folder, lambda hands: hands.put_tree(folder, files))

    def link(self, links: Mapping[str, str]) -> None:
        """See file_acts."""
        for path, target in links.items():
            self._change(path, lambda hands, path=path, target=target: hands.link({path: target}))  # type: ignore[misc]

    # --- Processes

    def inspect_processes(self, identities: Sequence[ProcessIdentity]) -> ProcessReport:
        """Which of these processes live on any host; None for one that may live on a host out of reach."""
        reports, problems = self._gather(lambda hands: hands.inspect_processes(identities))
        if not reports:
            raise next(iter(problems.values()))
        first = next(iter(reports.values()))
        alive = [
            _alive([report.alive[index] for report in reports.values()], problems) for index in range(len(identities))
        ]
        return ProcessReport(first.host, first.boot_id, tuple(alive))

    def processes_of_run(self, run_dir: str, leaders: Sequence[ProcessIdentity]) -> list[ProcessIdentity]:
        """Processes of a run on all hosts."""
        found = self._everywhere(lambda hands: hands.processes_of_run(run_dir, leaders))
        return [identity for identities in found.values() for identity in identities]

    def end_run(self, run_dir: str, leaders: Sequence[ProcessIdentity], *, grace_s: float) -> list[ProcessIdentity]:
        """End a run on all hosts at once.

        Raises:
            SchedulerError: a host could not be asked; the others have been.
        """
        left = self._everywhere(lambda hands: hands.end_run(run_dir, leaders, grace_s=grace_s))
        return [identity for identities in left.values() for identity in identities]

    def close(self) -> None:
        """Let go of all hosts."""
        for member in self._members.values():
            member.hands.close()

    # --- How it is done

    def _is_common(self, path: str) -> bool:
        """Whether all hosts see one file at this path."""
        if not self._shared:
            return False
        root = self._runs_root
        if root is not None and (root == "~" or root.startswith("~/")):
            root = self.home() + root[1:]
        return root is None or path == root or path.startswith(root.rstrip("/") + "/")

    def _change(self, path: str, act: Callable[[Hands], object]) -> None:
        if self._is_common(path):
            act(self._one().hands)
        else:
            self._everywhere(act)

    def _one(self) -> "_Member":
        """The host that speaks for all: the one chosen before, else the first that answers."""
        if self._chosen is None:
            self._look(lambda hands: hands.home())
        assert self._chosen is not None
        return self._chosen

    def _look(self, act: Callable[[Hands], T]) -> T:
        """What one host answers; where it cannot be reached, what another does."""
        first = self._chosen or self._members[self.hosts[0]]
        try:
            answer = first.ask(act)
        except SchedulerError as error:
            if not error.transient:
                raise  # such as a changed host key: nothing to go around
            return self._look_elsewhere(first, error, act)
        self._chosen = first
        return answer

    def _look_elsewhere(self, lost: "_Member", problem: SchedulerError, act: Callable[[Hands], T]) -> T:
        others = [member for member in self._members.values() if member is not lost]
        answers, _ = _ask_each(others, lambda member: member.ask(act))
        if not answers:
            raise problem
        host = next(iter(answers))
        print(f"llmctl: {bare(problem)}; going on through {host}", file=sys.stderr, flush=True)
        self._chosen = self._members[host]
        return answers[host]

    def _gather(self, act: Callable[[Hands], T]) -> tuple[dict[str, T], dict[str, SchedulerError]]:
        return _ask_each(list(self._members.values()), lambda member: member.ask(act))

    def _answers(self, act: Callable[[Hands], T]) -> list[T]:
        """What the hosts in reach answer; at least one does."""
        answers, problems = self._gather(act)
        refused = next((error for error in problems.values() if not error.transient), None)
        if refused is not None or not answers:
            raise refused or next(iter(problems.values()))
        return list(answers.values())

    def _everywhere(self, act: Callable[[Hands], T]) -> dict[str, T]:
        """What every host answers; all are asked before one that failed is told of."""
        answers, problems = self._gather(act)
        if problems:
            raise joined(problems)
        return answers


class _Member:
    """One host and its hands. Remembers for a moment that it could not be reached."""

    def __init__(self, host: str, hands: Hands) -> None:
        self.host = host
        self.hands = hands
        self._problem: SchedulerError | None = None
        self._until = 0.0

    def ask(self, act: Callable[[Hands], T]) -> T:
        if self._problem is not None and time.monotonic() < self._until:
            raise self._problem
        try:
            answer = act(self.hands)
        except SchedulerError as error:
            self._problem, self._until = error, time.monotonic() + HOLD_OFF_S
            raise
        self._problem = None
        return answer


class _Watched:
    """The hands of one host, whose failures its group hears of too."""

    def __init__(self, member: _Member) -> None:
        self._member = member

    def __getattr__(self, name: str) -> Any:
        if name in ("inspect_processes", "processes_of_run", "read_parts", "list_names", "look_at"):
            return lambda *args, **options: self._member.ask(lambda hands: getattr(hands, name)(*args, **options))
        return getattr(self._member.hands, name)


def joined(problems: Mapping[str, SchedulerError]) -> SchedulerError:
    """Several hosts' failures as one, each of which names its host."""
    texts = [text if host in (text := bare(error)) else f"{host}: {text}" for host, error in problems.items()]
    return SchedulerError(
        "; ".join(dict.fromkeys(texts)), transient=all(error.transient for error in problems.values())
    )


def _ask_each(
    members: Sequence[_Member], act: Callable[[_Member], T]
) -> tuple[dict[str, T], dict[str, SchedulerError]]:
    """What each host answers, and why others do not; all at once, each in a thread of its own."""
    answers: dict[str, T] = {}
    problems: dict[str, SchedulerError] = {}
    others: dict[str, BaseException] = {}

    def ask(member: _Member) -> None:
        try:
            answers[member.host] = act(member)
        except SchedulerError as error:
            problems[member.host] = error
        except BaseException as error:  # raised again below, in the thread that asked
            others[member.host] = error

    # Daemons: a Ctrl-C need not wait for a host that does not answer.
    threads = [threading.Thread(target=ask, args=(member,), daemon=True) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for host, failure in others.items():
        raise _named(host, failure)
    hosts = [member.host for member in members]
    return {host: answers[host] for host in hosts if host in answers}, {
        host: problems[host] for host in hosts if host in problems
    }


def _short(name: str) -> str:
    return name.partition(".")[0].lower()


def _on(member: _Member, act: Callable[[Hands], T]) -> T:
    try:
        return member.ask(act)
    except OSError as error:
        raise _named(member.host, error) from None


def _named(host: str, failure: BaseException) -> BaseException:
    """A failure to change a file says on which host."""
    if isinstance(failure, OSError):
        with suppress(TypeError):
            return type(failure)(failure.errno, f"{failure.strerror} on {host}", failure.filename)
    return failure


def _alive(answers: Sequence[bool | None], problems: Mapping[str, SchedulerError]) -> bool | None:
    if any(answers):
        return True
    return None if problems or None in answers else False


def _common(facts: Sequence[PathFacts]) -> PathFacts:
    """What holds on all hosts: the facts of one where it is missing, if there is such a one."""
    first = next((one for one in facts if not one.kind), facts[0])
    worst = next((one for one in facts if not one.can_write or one.is_read_only), first)
    if first.kind:
        first = worst
    return replace(first, can_write=worst.can_write, free_bytes=min(one.free_bytes for one in facts))


def bare(error: SchedulerError) -> str:
    """The message without the remark on trying again, which whoever passes it on makes anew."""
    message = error.message
    for hint in _HINTS:
        message = message.removesuffix(hint)
    return message

"""One of several hosts, and asking all of them at once: what llmctl.transport.host_group is made of."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from llmctl.errors import SchedulerError
from llmctl.transport.file_writes import PathFacts
from llmctl.transport.protocol import Transport

HOLD_OFF_S = 5.0
"""A host that could not be reached is not tried again for this long: every try takes seconds."""
_HINTS = (" (trying again later can help)", " (trying again will not help)")

T = TypeVar("T")


class HostMember:
    """One host and its hands. Remembers for a moment that it could not be reached."""

    def __init__(self, host: str, transport: Transport) -> None:
        self.host = host
        self.transport = transport
        self._problem: SchedulerError | None = None
        self._until = 0.0

    def ask(self, act: Callable[[Transport], T]) -> T:
        """What the host answers.

        Raises:
            SchedulerError: it cannot be reached, or could not a moment ago.
        """
        if self._problem is not None and time.monotonic() < self._until:
            raise self._problem
        try:
            answer = act(self.transport)
        except SchedulerError as error:
            self._problem, self._until = error, time.monotonic() + HOLD_OFF_S
            raise
        self._problem = None
        return answer


class WatchedTransport:
    """The hands of one host, whose failures its group hears of too."""

    def __init__(self, member: HostMember) -> None:
        self._member = member

    def __getattr__(self, name: str) -> Any:
        if name in ("inspect_processes", "processes_of_run", "read_parts", "list_names", "look_at"):
            return lambda *args, **options: self._member.ask(
                lambda transport: getattr(transport, name)(*args, **options)
            )
        return getattr(self._member.transport, name)


def joined(problems: Mapping[str, SchedulerError]) -> SchedulerError:
    """Several hosts' failures as one, each of which names its host."""
    texts = [text if host in (text := bare(error)) else f"{host}: {text}" for host, error in problems.items()]
    return SchedulerError(
        "; ".join(dict.fromkeys(texts)), transient=all(error.transient for error in problems.values())
    )


def ask_each(
    members: Sequence[HostMember], act: Callable[[HostMember], T]
) -> tuple[dict[str, T], dict[str, SchedulerError]]:
    """What each host answers, and why others do not; all at once, each in a thread of its own."""
    answers: dict[str, T] = {}
    problems: dict[str, SchedulerError] = {}
    others: dict[str, BaseException] = {}

    def ask(member: HostMember) -> None:
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


def short_name(name: str) -> str:
    """A host's name without its domain."""
    return name.partition(".")[0].lower()


def ask_named(member: HostMember, act: Callable[[Transport], T]) -> T:
    """What a host answers; a file that cannot be changed is told of with the host's name."""
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


def alive_anywhere(answers: Sequence[bool | None], problems: Mapping[str, SchedulerError]) -> bool | None:
    """Whether a process lives, by what the hosts in reach say; None if one out of reach may know."""
    if any(answers):
        return True
    return None if problems or None in answers else False


def common_facts(facts: Sequence[PathFacts]) -> PathFacts:
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

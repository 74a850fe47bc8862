"""One host of a group, and calls to all hosts at once: the parts of llmctl.transport.host_group."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from llmctl.errors import TRANSIENT_HINT, SchedulerError
from llmctl.transport.file_writes import PathFacts
from llmctl.transport.protocol import Transport

HOLD_OFF_S = 5.0
"""Seconds before an unreachable host is tried again: every attempt takes seconds."""

T = TypeVar("T")


class HostMember:
    """One host and its transport. Remembers a failed connection for ``HOLD_OFF_S``."""

    def __init__(self, host: str, transport: Transport) -> None:
        self.host = host
        self.transport = transport
        self._problem: SchedulerError | None = None
        self._until = 0.0

    def ask(self, act: Callable[[Transport], T]) -> T:
        """Call ``act`` with the host's transport.

        Raises:
            SchedulerError: the host is unreachable, or was within the last ``HOLD_OFF_S``.
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
    """Transport of one host that also reports its failures to the group."""

    def __init__(self, member: HostMember) -> None:
        self._member = member

    def __getattr__(self, name: str) -> Any:
        if name in ("inspect_processes", "processes_of_run", "read_parts", "list_names", "stat_paths"):
            return lambda *args, **options: self._member.ask(
                lambda transport: getattr(transport, name)(*args, **options)
            )
        return getattr(self._member.transport, name)


def joined(problems: Mapping[str, SchedulerError]) -> SchedulerError:
    """Failures of several hosts as one error, each with the name of its host."""
    texts = [text if host in (text := bare(error)) else f"{host}: {text}" for host, error in problems.items()]
    return SchedulerError(
        "; ".join(dict.fromkeys(texts)), transient=all(error.transient for error in problems.values())
    )


def ask_each(
    members: Sequence[HostMember], act: Callable[[HostMember], T]
) -> tuple[dict[str, T], dict[str, SchedulerError]]:
    """Call ``act`` for all hosts at once, each in its own thread; answers and errors by host."""
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

    # Daemon threads: Ctrl-C need not wait for a host that does not answer.
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
    """Call ``act`` with a host's transport; an OSError then names the host."""
    try:
        return member.ask(act)
    except OSError as error:
        raise _named(member.host, error) from None


def _named(host: str, failure: BaseException) -> BaseException:
    """The failure, with the host's name in an OSError."""
    if isinstance(failure, OSError):
        with suppress(TypeError):
            return type(failure)(failure.errno, f"{failure.strerror} on {host}", failure.filename)
    return failure


def alive_anywhere(answers: Sequence[bool | None], problems: Mapping[str, SchedulerError]) -> bool | None:
    """True if a process lives on any reachable host; None if it may live on an unreachable one."""
    if any(answers):
        return True
    return None if problems or None in answers else False


def common_facts(facts: Sequence[PathFacts]) -> PathFacts:
    """Facts that hold on all hosts; those of a host that lacks the path, if any does."""
    first = next((fact for fact in facts if not fact.kind), facts[0])
    worst = next((fact for fact in facts if not fact.can_write or fact.is_read_only), first)
    if first.kind:
        first = worst
    return replace(first, can_write=worst.can_write, free_bytes=min(fact.free_bytes for fact in facts))


def bare(error: SchedulerError) -> str:
    """Message without its retry hint; the caller adds its own."""
    return error.message.removesuffix(TRANSIENT_HINT)

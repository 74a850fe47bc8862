"""Errors on the route to a host: one sentence each, and whether a retry can help."""

import errno
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llmctl.errors import SchedulerError

BROKEN: tuple[type[Exception], ...] = (EOFError, OSError, ValueError)
"""Errors of a broken connection: paramiko raises a bare EOFError when a write fails, closed files a ValueError."""


class ConnectionLost(SchedulerError):
    """Loss of an open connection. ``argv``: the command under way, which may or may not have run to its end."""

    def __init__(self, message: str, *, argv: Sequence[str] = ()) -> None:
        super().__init__(message, transient=True, argv=argv)


class PromptRefused(SchedulerError):
    """A question that must not be asked now, or a missing terminal."""

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message, transient=transient)


@contextmanager
def told_as_lost(host: str, *library: type[Exception]) -> Iterator[None]:
    """Raise the errors of an open connection as ConnectionLost: of its socket or pipe, and of a library.

    Only for calls that use nothing but the connection: errors of the user's files and terminal are told otherwise.

    Args:
        host: the user's name for the host.
        library: errors of the library that makes the connection.
    """
    try:
        yield
    except (*BROKEN, *library) as error:
        raise ConnectionLost(f"{host}: connection lost: {reason(error)}") from None


def reason(error: Exception) -> str:
    """Reason for a loss, in words also where the error has none."""
    if isinstance(error, TimeoutError):
        return "the host accepts no more data"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or "closed by the other side"


def unreachable(host: str, address: str, port: int, error: OSError, waited_s: float) -> SchedulerError:
    """Error for an unreachable ssh port. ``host`` is the user's name for the host."""
    where = host if host == address else f"{host} ({address})"
    if isinstance(error, socket.gaierror):
        is_passing = error.errno in (socket.EAI_AGAIN, socket.EAI_SYSTEM)
        what = "the name service does not answer" if is_passing else "there is no host of this name"
        hint = "" if is_passing else "; is it spelled right, and does it need a ProxyJump or a VPN?"
        return SchedulerError(f"{where}: {what}{hint}", transient=is_passing)
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return SchedulerError(f"{where}: no answer on port {port} within {waited_s:.0f} s; is it up?", transient=True)
    if error.errno == errno.ECONNREFUSED:
        return SchedulerError(f"{where}: nothing listens on port {port}; is its sshd down?", transient=True)
    reason = error.strerror or str(error) or type(error).__name__
    is_passing = error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNRESET, errno.ECONNABORTED)
    return SchedulerError(f"{where}: port {port} cannot be reached: {reason}", transient=is_passing)

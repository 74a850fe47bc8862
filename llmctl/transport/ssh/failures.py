"""Errors on the route to a host: one sentence each, and whether a retry can help."""

import errno
import socket
from collections.abc import Sequence

from llmctl.errors import SchedulerError


class ConnectionLost(SchedulerError):
    """Loss of an open connection. ``argv``: the command under way, which may or may not have run to its end."""

    def __init__(self, message: str, *, argv: Sequence[str] = ()) -> None:
        super().__init__(message, transient=True, argv=argv)


class PromptRefused(SchedulerError):
    """A question that must not be asked now, or a missing terminal."""

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message, transient=transient)


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

"""What can go wrong on the way to a host, as one sentence each that says whether trying again can help."""

import errno
import socket
from collections.abc import Sequence

from llmctl.errors import SchedulerError


class ConnectionLost(SchedulerError):
    """A connection that was there and is gone. ``argv``: the command that was under way; it may or may not be done."""

    def __init__(self, message: str, *, argv: Sequence[str] = ()) -> None:
        super().__init__(message, transient=True, argv=argv)


class PromptRefused(SchedulerError):
    """A question that must not be asked now, or that nobody is there to answer."""

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message, transient=transient)


def unreachable(host: str, address: str, port: int, error: OSError, waited_s: float) -> SchedulerError:
    """The failure to reach a host's ssh port. ``host`` is the user's word for it."""
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

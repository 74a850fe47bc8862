"""llmctl's errors. Each carries its exit code. Only the command line prints errors."""

import errno
from collections.abc import Sequence

BUG = 1
INTERRUPTED = 130
TRANSIENT_HINT = " (trying again later can help)"
"""At the end of the message of an error that may pass. Any other message says itself what to do."""


class LlmctlError(Exception):
    """An error that the user, the site or the network can correct.

    Attributes:
        message: what is wrong, where (file and key, or flag), what is valid, what to do; at most two lines.
        exit_code: exit code of the process.
    """

    exit_code = BUG

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class UsageError(LlmctlError):
    """An invalid flag or argument."""

    exit_code = 2


class ProfileError(LlmctlError):
    """An invalid cluster profile, overlay or user config file, or a missing profile."""

    exit_code = 3


class ConfigFileError(LlmctlError):
    """An invalid training config file, or an unusable path in a config file."""

    exit_code = 3


class SchedulerError(LlmctlError):
    """A failed scheduler command, connection or process start.

    Attributes:
        transient: True if a later retry can help.
        argv: the command that failed; empty if none was run.
        exit_status: exit status of the command; None if the command never ran or its status was lost.
        stderr_tail: the end of the command's standard error.
    """

    exit_code = 4

    def __init__(
        self,
        message: str,
        *,
        transient: bool,
        argv: Sequence[str] = (),
        exit_status: int | None = None,
        stderr_tail: str = "",
    ) -> None:
        super().__init__(message + (TRANSIENT_HINT if transient else ""))
        self.transient = transient
        self.argv = tuple(argv)
        self.exit_status = exit_status
        self.stderr_tail = stderr_tail


class ProgramMissing(SchedulerError):
    """A program that the machine does not have, or does not let the user run."""


class SubmissionLost(SchedulerError):
    """A submission that the scheduler may or may not have accepted; the run keeps its directory for a later search."""


class RecordError(LlmctlError):
    """An unknown run, or a run record that cannot be read or written."""

    exit_code = 5


class FollowedRunFailed(LlmctlError):
    """The followed run did not complete."""

    exit_code = 6


class WaitTimeout(LlmctlError, TimeoutError):
    """The run had not ended when the caller's time was over. Only the Python API waits so."""

    exit_code = 6


def system_error(error: OSError | RecursionError) -> LlmctlError | None:
    """The error of the user behind an error of the operating system, or of a value without an end; None: another."""
    if isinstance(error, RecursionError):
        return UsageError(
            "a value on the command line or in a file is nested too deeply, or contains itself; write it flat"
        )
    if isinstance(error, PermissionError):
        return ConfigFileError(f"{error.filename}: {error.strerror}")
    if error.errno == errno.ENAMETOOLONG:
        return UsageError(f"{str(error.filename)[:80]}...: is longer than a file name may be; give a shorter one")
    return None

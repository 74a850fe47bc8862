"""The errors that llmctl ends with. Each carries its exit code; the command line prints them, they never print."""

from collections.abc import Sequence

BUG = 1
INTERRUPTED = 130


class LlmctlError(Exception):
    """Something that the user, the site or the network can put right.

    Attributes:
        message: what is wrong, where (file and key, or flag), what was valid, what to do; at most two lines.
        exit_code: what the process ends with.
    """

    exit_code = BUG

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class UsageError(LlmctlError):
    """A flag or argument that cannot be used."""

    exit_code = 2


class ProfileError(LlmctlError):
    """A cluster profile, overlay or user's config file that cannot be used, or a cluster that has none."""

    exit_code = 3


class ConfigFileError(LlmctlError):
    """A training config file, or a place that it names, that cannot be used."""

    exit_code = 3


class SchedulerError(LlmctlError):
    """A scheduler, connection or process start that failed.

    Attributes:
        transient: whether trying again later can help.
        argv: the command that failed; empty if none was run.
        exit_status: its exit status; None if it never ran or was lost.
        stderr_tail: the end of what it said.
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
        hint = "trying again later can help" if transient else "trying again will not help"
        super().__init__(f"{message} ({hint})")
        self.transient = transient
        self.argv = tuple(argv)
        self.exit_status = exit_status
        self.stderr_tail = stderr_tail


class SubmissionLost(SchedulerError):
    """A submission that the scheduler may or may not have accepted; the run keeps its directory for a later search."""


class RecordError(LlmctlError):
    """A run that is not known, or whose record cannot be read or written."""

    exit_code = 5


class FollowedRunFailed(LlmctlError):
    """The run that was followed ended other than completed."""

    exit_code = 6

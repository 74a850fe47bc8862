"""What a finished command left."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CommandResult:
    """Exit status and what was printed; of standard error the end."""

    exit_status: int
    stdout: str
    stderr: str

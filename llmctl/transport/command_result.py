"""What a finished command left."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CommandResult:
    """Exit status and what was printed; of standard error the end."""

    exit_status: int
    stdout: str
    stderr: str


def program_of(argv: Sequence[str]) -> str:
    """The program that a command is about: ``squeue`` of ``sh -c TEXT squeue ...``."""
    return argv[3] if len(argv) > 3 and tuple(argv[:2]) == ("sh", "-c") else argv[0]

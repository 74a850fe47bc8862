"""Output of commands: terminal tables, plain text in a pipe, or one JSON document."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.errors import ConfigFileError, UsageError

if TYPE_CHECKING:
    from rich.console import Console


def is_for_people() -> bool:
    """True if standard output is a terminal."""
    return sys.stdout.isatty()


def rich_console() -> "Console":
    """Build a rich console on standard output. rich is slow to import: call only for a table or colours."""
    from rich.console import Console

    return Console(highlight=False)


def print_json(document: Any) -> None:
    """Print one JSON document on standard output. ``llmctl schema`` has its schema."""
    print(json_text(document))


def json_text(document: Any) -> str:
    """A document as commands print it; a number that is not finite is null."""
    from trainer.config.records.json_text import json_text as text_of

    return text_of(document, indent=1)


def write_new_file(target: Path, text: str, shown: str) -> None:
    """Write a file that --output names or stands for.

    Args:
        target: the file, absolute.
        text: its content.
        shown: the file's name as the user knows it.

    Raises:
        UsageError: the file exists already.
        ConfigFileError: the file cannot be written.
    """
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"--output {shown}: exists already; name another file, or remove this one") from None
    except OSError as error:
        raise ConfigFileError(f"--output {shown}: cannot be written: {error.strerror}") from None

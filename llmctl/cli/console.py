"""Output of commands: terminal tables, plain text in a pipe, or one JSON document."""

import sys
from typing import TYPE_CHECKING, Any

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
    """Print one JSON document on standard output."""
    import json

    print(json.dumps(document, indent=1))

"""How commands print: for people on a terminal, plain text in a pipe, one JSON document where that is asked for."""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def is_for_people() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()


def rich_console() -> "Console":
    """A rich console on standard output, which is slow to import: ask for it only where a table or colour is due."""
    from rich.console import Console

    return Console(highlight=False)


def print_json(document: Any) -> None:
    """One JSON document on standard output."""
    import json

    print(json.dumps(document, indent=1))


def say(message: str) -> None:
    """A remark for people, on standard error so that output stays clean for a pipe."""
    print(message, file=sys.stderr)

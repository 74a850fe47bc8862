"""A server of the tests: its command, and the first message of a client that speaks for itself."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
HELLO = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}


def words_of(*options: str) -> list[str]:
    """The command of a server."""
    return [sys.executable, "-m", "llmctl", "mcp", *options]

"""The page on troubleshooting: every message on it is one that the code prints."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.shown_commands import ROOT

PAGE = ROOT / "docs/guide/troubleshooting.md"
MESSAGES = re.findall(r"^```text\n(.*?)\n```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
GAP = "\0"
"""A value inside a message of the code."""


def texts_of(path: Path) -> Iterator[str]:
    """Every string of a file that is not a docstring, with gaps in place of values."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


@cache
def texts() -> tuple[str, ...]:
    """The strings of both packages that are long enough for a message."""
    files = (path for name in ("llmctl", "trainer") for path in sorted((ROOT / name).rglob("*.py")))
    return tuple({" ".join(text.split()) for path in files for text in texts_of(path) if len(text) > 12})


def is_printed(message: str) -> bool:
    """True if one string of the code has the parts of a message between its gaps, in this order."""
    # A key before a colon is printed by another place than the words after it.
    message = re.sub(r"^(job\.\w+|environment|CONFIG): ", "", message)
    parts = [" ".join(part.split()) for part in message.split("...") if re.search(r"\w", part)]
    return bool(parts) and any(re.search(".*".join(map(re.escape, parts)), text) for text in texts())


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message[:50])
def test_a_message_of_the_page_is_one_of_the_code(message: str) -> None:
    assert max(len(part) for part in message.split("...")) >= 12
    assert is_printed(message)


def test_a_message_that_no_code_prints_is_found() -> None:
    assert is_printed("... has no torch, which the trainer needs")
    assert not is_printed("... has no torch, which the pilot needs")
    assert not is_printed("which the trainer needs ... has no torch")


def test_the_page_has_messages_of_every_moment() -> None:
    parts = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert [part.partition("\n")[0] for part in parts if part.count("```text") >= 4] == [
        *("Before the queue", "The connection to a cluster", "The job does not start", "The first step"),
        *("During the night", "After the run"),
    ]

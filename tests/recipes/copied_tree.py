"""A copy of this repository, in which a test follows a page of docs/dev to the letter."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.waiting import HANG_S

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "clusters", "csrc", "docs", "examples", "llmctl", "scripts", "templates", "tests", "trainer")
# Bytecode is copied too: compiling it again would take longest. Other tests may be writing theirs.
IGNORED = shutil.ignore_patterns("*.pyc.*")
GATES = "tests/test_architecture.py tests/test_rooms.py tests/test_docs.py"
"""The tests of ``make check``."""
WITHOUT_USERS = "--ignore tests/llmctl/submit/test_hostile_users.py"
"""Other users cannot read a copy in a folder of pytest's."""
PROOF_S = 3600
"""Limit of a test marked ``proof``."""


class CopiedTree:
    """The repository in another folder: what a step changes there leaves the checkout alone."""

    def __init__(self, root: Path) -> None:
        """Copy the repository to ``root``."""
        self.root = root
        for folder in FOLDERS:
            shutil.copytree(ROOT / folder, root / folder, ignore=IGNORED, symlinks=True)
        for file in (path for path in ROOT.iterdir() if path.is_file()):
            shutil.copy2(file, root)
        # The commands of the pages name it. The packages of the copy come first on the path.
        (root / ".venv").symlink_to(sys.prefix)

    def text(self, path: str) -> str:
        """Content of a file."""
        return (self.root / path).read_text(encoding="utf-8")

    def write(self, path: str, text: str) -> None:
        """Write a new file."""
        file = self.root / path
        assert not file.exists(), f"{path} is there already"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def change(self, path: str, old: str, new: str) -> None:
        """Replace a text that occurs once in a file."""
        text = self.text(path)
        assert text.count(old) == 1, f"{path}: {old!r} occurs {text.count(old)} times; the recipe changes it"
        (self.root / path).write_text(text.replace(old, new), encoding="utf-8")

    def change_all(self, path: str, old: str, new: str) -> None:
        """Replace every occurrence of a text in a file, at least one."""
        text = self.text(path)
        assert old in text, f"{path}: {old!r} does not occur; the recipe changes it"
        (self.root / path).write_text(text.replace(old, new), encoding="utf-8")

    def add_after(self, path: str, line: str, addition: str) -> None:
        """Add a text behind a line that occurs once in a file."""
        self.change(path, f"\n{line}\n", f"\n{line}\n{addition}\n")

    def run(self, command: str, *, limit_s: float = HANG_S, **variables: str) -> str:
        """Output of a shell command in the copy's folder, which must succeed."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        own = {"PYTHONPATH": str(self.root), "PATH": f"{self.root}/.venv/bin:{kept['PATH']}", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.root,
            env={**kept, **own, **variables},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}{done.stderr[-3000:]}"
        return done.stdout

    def check_format(self) -> None:
        """Check format and lint as ``make check`` does."""
        self.run(".venv/bin/ruff format --check . && .venv/bin/ruff check .")

    def prove(self, words: str) -> None:
        """Run tests of the copy that take long: for tests marked ``proof``."""
        self.run(f".venv/bin/python -m pytest -x -p no:cacheprovider {words}", limit_s=PROOF_S)


def proof_of(page: str, **names: str) -> list[str]:
    """Commands of the first code block below ``## Proof`` on a page of docs/dev.

    Args:
        page: name of the page, such as ``add-a-op``.
        names: placeholder -> name in this recipe.
    """
    _, _, rest = (ROOT / f"docs/dev/{page}.md").read_text(encoding="utf-8").partition("\n## Proof\n")
    block = re.match(r"\n((?: {4}.*\n)+)", rest)
    assert block is not None, f"{page} has no commands below Proof"
    commands = [line.partition("  #")[0].strip() for line in block[1].splitlines()]
    for placeholder, name in names.items():
        commands = [re.sub(rf"\b{placeholder}\b|(?<=test_){placeholder}(?=\.py)", name, line) for line in commands]
    return commands


def narrowed(command: str, expression: str) -> str:
    """A pytest command for the tests that match an expression alone."""
    assert " -m pytest " in command
    return f"{command} -p no:cacheprovider -k '{expression}'"

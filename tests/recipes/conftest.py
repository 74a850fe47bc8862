"""Fixture of the recipes: a copy of this repository."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recipes.copied_tree import CopiedTree


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[CopiedTree]:
    """A copy of this repository, removed after the test: pytest would keep several."""
    root = tmp_path / "tree"
    root.mkdir()
    try:
        yield CopiedTree(root)
    finally:
        shutil.rmtree(root)

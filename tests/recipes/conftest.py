"""Fixture of the recipes: a copy of this repository."""

from pathlib import Path

import pytest

from tests.recipes.copied_tree import CopiedTree


@pytest.fixture
def tree(tmp_path: Path) -> CopiedTree:
    """A copy of this repository, removed with the test's folder."""
    root = tmp_path / "tree"
    root.mkdir()
    return CopiedTree(root)

"""``llmctl data`` in an environment without torch."""

import os
import subprocess
import sys

import pytest

from examples.train_tokenizer import train_byte_level_bpe
from llmctl.paths import PACKAGE
from tests.waiting import HANG_S

# Python finds no torch, whatever is installed, in the processes of llmctl and in all that they start.
_BLOCK = """\
from importlib.machinery import PathFinder
found = PathFinder.find_spec
def find_spec(name, *rest):
    return None if name == "torch" else found(name, *rest)
PathFinder.find_spec = find_spec
"""


@pytest.fixture
def llmctl(tmp_path, home):
    """Runs the command line of a user whose Python has no torch."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(_BLOCK)
    path = os.pathsep.join((str(tmp_path / "site"), str(PACKAGE.parent)))

    def run(*words):
        return subprocess.run(
            [sys.executable, "-m", "llmctl", *words],
            cwd=tmp_path,
            env={**os.environ, "HOME": str(home), "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )

    return run


def test_text_is_prepared_inspected_and_merged(llmctl, tmp_path):
    (tmp_path / "a.txt").write_text("one two three\n")
    train_byte_level_bpe(["one two three\n"], 260, tmp_path / "tokenizer.json")
    prepared = llmctl("data", "prepare", "a.txt", "--output", "a", "--tokenizer", "tokenizer.json")
    assert prepared.returncode == 0, prepared.stdout + prepared.stderr
    merged = llmctl("data", "merge", "a_text_document", "a_text_document", "--output", "b")
    assert merged.returncode == 0, merged.stdout + merged.stderr
    shown = llmctl("data", "inspect", "b", "--verify")
    assert shown.returncode == 0 and "documents   2\n" in shown.stdout, shown.stdout + shown.stderr


def test_no_torch_is_found_here(llmctl):
    refused = llmctl("env", "kernels", "build")
    assert refused.returncode == 3 and "has no torch, which the trainer needs" in refused.stderr

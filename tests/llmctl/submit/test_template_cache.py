"""Cache of compiled templates: never stale, and rendering works without it."""

from pathlib import Path

import pytest
from jinja2 import Environment, FileSystemLoader

from llmctl.submit.render import TemplateCache


def fill(folder: Path, *, may_write: bool = True) -> str:
    """Render the template as a new process does."""
    cache = TemplateCache(folder, may_write=may_write)
    return Environment(loader=FileSystemLoader(folder), bytecode_cache=cache).get_template("a.j2").render(x=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.j2").write_text("old {{ x }}")
    return tmp_path


def test_a_compiled_copy_is_stored_and_reused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fill(folder) == "old 1"
    assert len(list((folder / "__pycache__").iterdir())) == 1

    def compile_anew(*_: object, **__: object) -> str:
        raise AssertionError("compiled a second time")

    monkeypatch.setattr(Environment, "compile", compile_anew)
    assert fill(folder) == "old 1"


def test_a_changed_template_is_compiled_again(folder: Path) -> None:
    fill(folder)
    (folder / "a.j2").write_text("new {{ x }}")
    assert fill(folder) == "new 1"


def test_a_damaged_copy_is_ignored(folder: Path) -> None:
    fill(folder)
    (copy,) = (folder / "__pycache__").iterdir()
    whole = copy.read_bytes()
    for damaged in (b"", whole[:5], whole[:-20], whole[:30] + b"\xff" * 50, b"x" * 200):
        copy.write_bytes(damaged)
        assert fill(folder) == "old 1"


def test_no_copy_is_stored_if_unwanted_or_impossible(folder: Path) -> None:
    assert fill(folder, may_write=False) == "old 1"
    assert not (folder / "__pycache__").exists()
    (folder / "__pycache__").write_text("in the way")
    assert fill(folder) == "old 1"

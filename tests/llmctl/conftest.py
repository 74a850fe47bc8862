"""Shared fixtures."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmctl import backends
from llmctl.cli import console, main
from llmctl.context import Context
from llmctl.site import profile
from tests.llmctl.documents import name_of, problems_of
from tests.llmctl.login_node import write_cluster
from tests.llmctl.scripted_cluster import ScriptedCluster
from tests.standins import scripted_scheduler


@pytest.fixture(autouse=True)
def valid_documents(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compare every document that a command prints in this process with the command's schema."""
    words: list[list[str]] = []
    problems: list[str] = []
    call, text_of = main._call, console.json_text

    def called(given: list[str], context: Context) -> Any:
        words.append(given)
        return call(given, context)

    def checked(document: Any) -> str:
        problems.extend(problems_of(name_of(words[-1]), document))
        return text_of(document)

    monkeypatch.setattr(main, "_call", called)
    monkeypatch.setattr(console, "json_text", checked)
    yield
    assert not problems, "\n".join(problems)


@pytest.fixture
def frozen_time(monkeypatch: pytest.MonkeyPatch) -> float:
    """The time of day of this process, which stands still: an age is the same number however long the test takes."""
    return _freeze_time(monkeypatch)


def _freeze_time(monkeypatch: pytest.MonkeyPatch) -> float:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    return now


@pytest.fixture
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``tmp_path`` as working directory, with the folders ``config`` and ``state`` of a new user."""
    for name in ("CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def home(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``own_folders`` of a user of cluster local: runs are in ``runs``, and there are no GPUs."""
    monkeypatch.setenv("LLMCTL_RUNS_ROOT", str(own_folders / "runs"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return own_folders


@pytest.fixture
def login_node(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine as the login node of cluster lab; returns the folder of the user, and of the stand-in's notes."""
    monkeypatch.setenv("NOTES", str(own_folders))
    write_cluster(own_folders)
    return own_folders


@pytest.fixture
def cluster(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedCluster:
    """A cluster with the scripted stand-in as its scheduler, a separate home, and a time of day that stands still."""
    _freeze_time(monkeypatch)
    monkeypatch.setitem(backends.MODULES, "scripted", scripted_scheduler.__name__)
    monkeypatch.setattr(profile, "SCHEDULERS", (*profile.SCHEDULERS, "scripted"))
    made = ScriptedCluster(own_folders)
    monkeypatch.setattr(scripted_scheduler, "BACKEND", made.backend, raising=False)
    return made

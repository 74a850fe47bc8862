"""Fixtures of several test files."""

from pathlib import Path

import pytest

from llmctl import backends
from tests.llmctl.scripted_cluster import ScriptedCluster
from tests.standins import scripted_scheduler


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedCluster:
    """A cluster whose scheduler is the scripted stand-in, in a home of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setitem(backends.MODULES, "scripted", scripted_scheduler.__name__)
    made = ScriptedCluster(tmp_path)
    monkeypatch.setattr(scripted_scheduler, "BACKEND", made.backend, raising=False)
    return made

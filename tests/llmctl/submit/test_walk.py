"""The walk of a job: files that ``llmctl submit`` passes through until ``sbatch``, or to the end of a dry run.

Method: the command runs once so that every module is imported. A second run under sys.setprofile, which reports every
call and every resumed generator, ends where the sbatch of this test starts. The calls into llmctl/ and trainer/ are
kept, in order. The test counts the distinct files, and the switches: pairs of consecutive calls into different files.
Rendering counts: templates are not Python files, but the functions that a template calls are. Methods that dataclasses
generate have no file.
"""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType

import pytest

from llmctl.cli.main import main

ROOT = Path(__file__).parents[3]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("llmctl", "trainer"))
MAX_FILES = 27
MAX_FILES_OF_DRY_RUN = 27
MAX_SWITCHES = 90
SBATCH = "#!/bin/sh\necho 4242\n"


class Walk:
    """Files of the calls made since ``begin``, in order, until a program is started."""

    def __init__(self, program: str = "") -> None:
        self._program = program
        self.files: list[str] = []
        self.is_over = False

    def begin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Start recording calls."""
        start = subprocess.Popen.__init__

        def started(popen: subprocess.Popen[bytes], argv: list[str], *more: object, **others: object) -> None:
            if self._program in argv:
                sys.setprofile(None)
                self.is_over = True
            start(popen, argv, *more, **others)

        monkeypatch.setattr(subprocess.Popen, "__init__", started)
        sys.setprofile(self.note)

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Record a call."""
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGES):
            self.files.append(str(Path(file).relative_to(ROOT)))

    @property
    def switches(self) -> int:
        return sum(before != after for before, after in pairwise(self.files))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An empty home directory, and a fake sbatch."""
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin/sbatch"
    sbatch.write_text(SBATCH)
    sbatch.chmod(0o755)
    return {"HOME": str(tmp_path), "PATH": f"{tmp_path}/bin:/usr/bin:/bin", "LLMCTL_RUNS_ROOT": f"{tmp_path}/runs"}


def test_a_submission_passes_through_few_files_with_few_switches(environment, monkeypatch, capsys):
    arguments = ["submit", "--cluster", "slurm", "--", "echo", "hello"]
    assert main(arguments, environment) == 0
    walk = Walk("sbatch")
    before = sys.getprofile()
    try:
        walk.begin(monkeypatch)
        assert main(arguments, environment) == 0
    finally:
        sys.setprofile(before)
    assert "job 4242 on slurm" in capsys.readouterr().err
    assert walk.is_over
    passed = list(dict.fromkeys(walk.files))
    assert {"llmctl/cli/main.py", "llmctl/submit/render.py", "llmctl/submit/execute.py"} <= set(passed)
    assert len(passed) <= MAX_FILES, passed
    assert walk.switches <= MAX_SWITCHES, [after for before, after in pairwise(walk.files) if before != after]


def test_a_dry_run_of_a_config_passes_through_few_files(environment, capsys):
    config = str(ROOT / "examples/gpt_small.yaml")
    arguments = ["submit", "--show-script", "--cluster", "slurm", "--nodes", "2", config]
    assert main(arguments, environment) == 0
    walk = Walk()
    before = sys.getprofile()
    try:
        sys.setprofile(walk.note)
        assert main(arguments, environment) == 0
    finally:
        sys.setprofile(before)
    assert "#!/bin/bash" in capsys.readouterr().out
    passed = list(dict.fromkeys(walk.files))
    assert {"llmctl/submit/plan.py", "trainer/planning/build_config.py"} <= set(passed)
    assert len(passed) <= MAX_FILES_OF_DRY_RUN, passed

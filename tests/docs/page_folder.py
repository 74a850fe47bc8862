"""A folder with an empty home, in which a test types the commands of a page as a user does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.docs.shown_commands import ROOT
from tests.waiting import HANG_S, wait_for


class PageFolder:
    """The working directory of a page's commands, its home, and the program ``llmctl`` on its PATH."""

    def __init__(self, folder: Path) -> None:
        """Make the folders; ``examples`` is there as in a checkout."""
        self.work = folder / "work"
        self.work.mkdir()
        (self.work / "examples").symlink_to(ROOT / "examples")
        (folder / "home").mkdir()
        programs = folder / "bin"
        programs.mkdir()
        (programs / "llmctl").write_text(f'#!/bin/sh\nexec {sys.executable} -m llmctl "$@"\n')
        (programs / "llmctl").chmod(0o755)
        self._environment = {
            **os.environ,
            "HOME": str(folder / "home"),
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        self._output = folder / "output"

    def type(self, command: str, until: str = "", code: int = 0) -> None:
        """Run a command line to its end; with ``until``, Ctrl-C when its output has this pattern.

        Raises:
            AssertionError: another exit code than ``code``, or an end before the output had the pattern.
        """
        with self._output.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", command if until == "" else f"exec {command}"],
                cwd=self.work,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            if until:
                wait_for(lambda: re.search(until, self._text()) or process.poll() is not None, self._text)
                assert process.poll() is None, f"{command}: ended early:\n{self._text()}"
                process.send_signal(signal.SIGINT)
            ended = process.wait(HANG_S)
        finally:
            process.kill()
            process.wait()
        assert ended == code or (until and ended == 130), f"{command}: exit code {ended}\n{self._text()}"

    def end_runs(self) -> None:
        """Cancel every run that a command has started."""
        runs = sorted(path.parent.name for path in Path(self._environment["HOME"]).glob("llmctl-runs/*/run.json"))
        if runs:
            self.type(f"llmctl cancel {' '.join(runs)}")

    def _text(self) -> str:
        return self._output.read_text(errors="replace")

"""Runs of the trainer and of its speed test on ranks of this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.cpu_layouts.layouts import STEPS, Layout
from llmctl.submit.render import CPU_ENVIRONMENT
from trainer.process.run_directory import RunDirectory
from trainer.tuning.ranks import Place

ROOT = Path(__file__).parents[2]
LIMIT_S = 400
WARM_UP = 1
"""Steps before those that count."""
_POLL_S = 0.05
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB", re.MULTILINE)


class MeasurementError(Exception):
    """A rank failed or did not end; the message has its last words."""


class Ranks:
    """Processes of ``python -m trainer`` with a run directory."""

    def __init__(self, arguments: Sequence[str], ranks: int, folder: Path) -> None:
        """Start ``ranks`` of them in ``folder``; use as a context manager, whose end kills those that still run."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        place = Place(0, 1, ranks, "127.0.0.1")
        base = {**os.environ, **CPU_ENVIRONMENT, "PYTHONPATH": str(ROOT), "LLMCTL_RUN_DIR": str(folder)}
        self._log = folder / "output"
        with self._log.open("wb") as output:
            self._processes = [
                subprocess.Popen(
                    [sys.executable, "-m", "trainer", *arguments],
                    env={**base, **place.variables(rank, port)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for rank in range(ranks)
            ]
        self._until = time.monotonic() + LIMIT_S

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def is_done(self) -> bool:
        """True if all ranks have ended well.

        Raises:
            MeasurementError: one has not, or it takes too long.
        """
        codes = [process.poll() for process in self._processes]
        if any(codes) or time.monotonic() > self._until:
            words = self._log.read_text(errors="replace").strip().splitlines()[-3:]
            raise MeasurementError(f"ranks ended with {codes}: {' / '.join(words)}")
        return None not in codes

    def peaks(self) -> list[int]:
        """Most resident bytes of each rank so far (proc_pid_status(5)), as the trainer records them too."""
        texts = [Path(f"/proc/{process.pid}/status").read_text(encoding="ascii") for process in self._processes]
        return [1024 * int(found[1]) for found in map(_PEAK.search, texts) if found is not None]

    def cpu_seconds(self) -> list[float]:
        """CPU seconds of each rank so far, of all its threads (proc_pid_stat(5))."""
        texts = [Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii") for process in self._processes]
        # The name before the bracket may have spaces.
        values = [text.rpartition(")")[2].split() for text in texts]
        return [(int(found[11]) + int(found[12])) / os.sysconf("SC_CLK_TCK") for found in values]


def train(layout: Layout) -> dict[str, Any]:
    """Train for some steps: ``seconds`` of those that count, and of each rank ``cpu``, in a step, and ``peaks``.

    Raises:
        MeasurementError: a rank failed.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "config.yaml"
        config.write_text(json.dumps(layout.values), encoding="utf-8")
        metrics = RunDirectory(folder).metrics
        with Ranks(["pretrain", "--config", str(config)], layout.ranks, folder) as ranks:
            before = _cpu_after(WARM_UP, metrics, ranks)
            after = _cpu_after(STEPS, metrics, ranks)
            cpu = [(last - first) / (STEPS - WARM_UP) for first, last in zip(before, after, strict=True)]
            return {"seconds": _seconds(metrics)[WARM_UP:STEPS], "cpu": cpu, "peaks": ranks.peaks()}


def _cpu_after(steps: int, metrics: Path, ranks: Ranks) -> list[float]:
    while len(_seconds(metrics)) < steps:
        if ranks.is_done():
            raise MeasurementError("training ended before its steps")
        time.sleep(_POLL_S)
    return ranks.cpu_seconds()


def _seconds(metrics: Path) -> list[float]:
    if not metrics.exists():
        return []
    rows = [json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [row["iteration_time_s"] for row in rows if "iteration_time_s" in row]


def speed_test(ranks: int) -> dict[str, Any]:
    """The document of ``llmctl env bench`` on as many ranks, all at once.

    Raises:
        MeasurementError: a rank failed.
    """
    with TemporaryDirectory() as name:
        with Ranks(["bench"], ranks, Path(name)) as running:
            while not running.is_done():
                time.sleep(0.2)
        document: dict[str, Any] = json.loads(Path(name, "hardware.json").read_text(encoding="utf-8"))
        return document

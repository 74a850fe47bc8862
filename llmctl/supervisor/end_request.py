"""Ways to ask a launch line to end, to which launchers react differently, and the time that Slurm leaves a job."""

import os
import re
import signal
import subprocess
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import List, Mapping, Optional

from . import processes

_SLURM_S = 30.0
"""Patience with one command of Slurm, whose controller may be down."""
_LEFT = re.compile(r"([0-9]+-)?([0-9]+:){1,2}[0-9]+$")
"""squeue's words for a time: minutes and seconds, with hours and days before them if there are any."""


class EndRequest(ABC):
    """Interface: ask a started command to end, repeatedly if necessary."""

    @property
    def can_do_more(self) -> bool:
        """True if another request does more than the first."""
        return False

    @abstractmethod
    def send(self, pid: int) -> None:
        """Ask the command with this process id, which leads its process group, to end."""


class EndBySignal(EndRequest):
    """SIGTERM to the process group, each time."""

    def send(self, pid: int) -> None:
        """See EndRequest."""
        processes.signal_group(pid, signal.SIGTERM)


class EndByFile(EndRequest):
    """Files that the supervisor on each node polls.

    END_FILE asks the command of a node to end, END_FILE.now kills the command.

    For launchers whose own end kills their processes at once: mpirun gives the processes one second, and Grid Engine
    ends the whole job when a qrsh dies.
    """

    def __init__(self, end_file: str) -> None:
        """Use END_FILE and END_FILE.now of this path."""
        self._files = [end_file, f"{end_file}.now"]

    @property
    def can_do_more(self) -> bool:
        """See EndRequest."""
        return bool(self._files)

    def send(self, pid: int) -> None:
        """See EndRequest."""
        del pid
        if self._files:
            with suppress(OSError), open(self._files.pop(0), "a"):
                pass


class EndByLaunchLine(EndRequest):
    """SIGTERM to a launch line that asks its nodes itself (each_host.py), then a file that makes it kill them."""

    def __init__(self, end_file: str) -> None:
        """Use END_FILE.now of this path."""
        self._file = f"{end_file}.now"
        self._is_asked = False

    @property
    def can_do_more(self) -> bool:
        """See EndRequest."""
        return not os.path.exists(self._file)

    def send(self, pid: int) -> None:
        """See EndRequest."""
        if self._is_asked:
            with suppress(OSError), open(self._file, "a"):
                pass
        else:
            processes.signal_group(pid, signal.SIGTERM)
        self._is_asked = True


class EndByStep(EndRequest):
    """scancel to the run's own step of a Slurm job: SIGTERM, then SIGKILL, which reaches stopped processes too.

    Without the step, SIGTERM to srun, which kills what it has started. Slurm's own KillWait plays no part, except for a
    job that has reached its limit: Slurm (22.05) refuses scancel then, and kills what is left itself.
    """

    def __init__(self, job_id: str, step_name: str) -> None:
        """Find the step by its name.

        Another step of the job may be an attached shell (llmctl interactive --run).
        """
        self._job_id = job_id
        self._step_name = step_name
        self._signals = ["TERM", "KILL"]

    @property
    def can_do_more(self) -> bool:
        """See EndRequest."""
        return bool(self._signals)

    def send(self, pid: int) -> None:
        """See EndRequest."""
        if not self._signals or not self._signal_step(self._signals.pop(0)):
            processes.signal_group(pid, signal.SIGTERM)

    def _signal_step(self, name: str) -> bool:
        """Signal the step; returns False if the step does not exist yet, or Slurm does not answer."""
        try:
            asked = subprocess.run(
                ["squeue", "--noheader", "--steps", f"--jobs={self._job_id}", "--format=%i|%j"],
                stdout=subprocess.PIPE,
                timeout=_SLURM_S,
            )
            if asked.returncode != 0 and name == "TERM":
                subprocess.call(["scancel", f"--signal={name}", self._job_id], timeout=_SLURM_S)
                return True
            steps: List[List[str]] = [line.split("|", 1) for line in asked.stdout.decode(errors="replace").splitlines()]
            named = [step[0] for step in steps if step[1:] == [self._step_name]]
            return any(subprocess.call(["scancel", f"--signal={name}", step], timeout=_SLURM_S) == 0 for step in named)
        except subprocess.TimeoutExpired:
            return False


def left_of_slurm_job(job_id: str, environ: Mapping[str, str]) -> Optional[float]:
    """Seconds until a job of Slurm reaches its time limit, which may have been changed since its start.

    Slurm's end time (%e) would not do: a preemption cuts it to its grace time (Slurm's src/interfaces/preempt.c). The
    time left is the limit without the time used (src/squeue/print.c).

    Returns:
        Zero after the limit. None without one, or if Slurm does not answer.
    """
    try:
        asked = subprocess.run(
            ["squeue", "--noheader", f"--jobs={job_id}", "--format=%L"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=_SLURM_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    answer = asked.stdout.decode(errors="replace").strip()
    if answer == "INVALID":
        return 0.0
    if not _LEFT.match(answer):
        return None
    days, _, clock = answer.rpartition("-")
    seconds = int(days or 0) * 24 * 3600
    for place, number in enumerate(reversed(clock.split(":"))):
        seconds += int(number) * 60**place
    return float(seconds)

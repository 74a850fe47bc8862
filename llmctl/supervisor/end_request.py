"""Ways to ask a launch line to end.

Launchers react differently to a signal.
"""

import signal
import subprocess
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import List

from . import processes


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


class EndByStep(EndRequest):
    """scancel to the run's own step of a Slurm job, and finally SIGTERM to srun.

    srun kills its step when srun receives SIGTERM.
    """

    def __init__(self, job_id: str, step_name: str) -> None:
        """Find the step by its name.

        Another step of the job may be an attached shell (llmctl interactive --run).
        """
        self._job_id = job_id
        self._step_name = step_name
        self._is_asked = False

    def send(self, pid: int) -> None:
        """See EndRequest."""
        if self._is_asked or not self._ask_step():
            processes.signal_group(pid, signal.SIGTERM)
        self._is_asked = True

    def _ask_step(self) -> bool:
        """Ask the step to end; returns False if the step does not exist yet."""
        asked = subprocess.run(
            ["squeue", "--noheader", "--steps", f"--jobs={self._job_id}", "--format=%i|%j"], stdout=subprocess.PIPE
        )
        if asked.returncode != 0:
            subprocess.call(["scancel", "--signal=TERM", self._job_id])
            return True
        steps: List[List[str]] = [line.split("|", 1) for line in asked.stdout.decode(errors="replace").splitlines()]
        named = [step[0] for step in steps if step[1:] == [self._step_name]]
        return any(subprocess.call(["scancel", "--signal=TERM", step]) == 0 for step in named)

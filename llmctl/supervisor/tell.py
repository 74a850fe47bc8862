"""Ways to ask a launch line to end.

Launchers differ in what a signal to themselves does.
"""

import signal
import subprocess
from contextlib import suppress
from typing import List

from . import processes


class Teller:
    """A way to ask a started command to end, once and once more."""

    @property
    def can_do_more(self) -> bool:
        """True if asking again does more than asking once."""
        return False

    def tell(self, pid: int) -> None:
        """Ask the command with this process id, which leads its process group, to end."""
        raise NotImplementedError


class BySignal(Teller):
    """SIGTERM to the process group, each time."""

    def tell(self, pid: int) -> None:
        """See Teller."""
        processes.signal_group(pid, signal.SIGTERM)


class ByFile(Teller):
    """Files that the supervisor on each node looks for.

    END_FILE asks the command of a node to end, END_FILE.now kills it.

    For launchers whose own end takes their processes along at once: mpirun gives them one second, and Grid Engine ends
    the whole job when a qrsh dies.
    """

    def __init__(self, end_file: str) -> None:
        """Use files of this name."""
        self._files = [end_file, f"{end_file}.now"]

    @property
    def can_do_more(self) -> bool:
        """See Teller."""
        return bool(self._files)

    def tell(self, pid: int) -> None:
        """See Teller."""
        del pid
        if self._files:
            with suppress(OSError), open(self._files.pop(0), "a"):
                pass


class ByStep(Teller):
    """scancel to the run's own step of a Slurm job, and at last SIGTERM to srun.

    srun kills its step when srun is told to end.
    """

    def __init__(self, job_id: str, step_name: str) -> None:
        """Look for the step by its name.

        Another step of the job may be a person's shell (llmctl interactive --run).
        """
        self._job_id = job_id
        self._step_name = step_name
        self._told = False

    def tell(self, pid: int) -> None:
        """See Teller."""
        if self._told or not self._tell_step():
            processes.signal_group(pid, signal.SIGTERM)
        self._told = True

    def _tell_step(self) -> bool:
        """False if there is no step yet."""
        asked = subprocess.run(
            ["squeue", "--noheader", "--steps", f"--jobs={self._job_id}", "--format=%i|%j"], stdout=subprocess.PIPE
        )
        if asked.returncode != 0:
            subprocess.call(["scancel", "--signal=TERM", self._job_id])
            return True
        steps: List[List[str]] = [line.split("|", 1) for line in asked.stdout.decode(errors="replace").splitlines()]
        named = [step[0] for step in steps if step[1:] == [self._step_name]]
        return any(subprocess.call(["scancel", "--signal=TERM", step]) == 0 for step in named)

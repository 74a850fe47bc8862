"""Next attempt of a run on several machines that share the run directory.

The head node's exit.json tells the end of an attempt, and ``restarts`` in it that another one follows. Each other
machine records the end of its part in exit-NNNNN.json once its processes are gone, and ``stays`` in it that the machine
will wait for the head node's word. So no machine begins an attempt while another one still has processes of the last.
"""

import os
import time
from contextlib import suppress
from typing import NamedTuple, Sequence, Tuple

from ..attempt import Attempt, AttemptError, remove_secrets, tell
from ..peers import POLLS_PER_SECOND
from ..restarts import read_object
from ..settings import JobSettings
from ..watch import Watch

HEAD_PATIENCE_S = 120
"""Seconds without any sign of the head node, counted in polls, after which a machine waits no longer."""
_HEAD_TIMEOUT_S = 60.0
_LONG_TIMEOUT_S = 600.0
"""For a head node that may have to import an image first, or to load its environment again for a further attempt."""


class Absence(NamedTuple):
    """A machine that takes part in no further attempt.

    Attributes:
        sentence: names the machine and tells what is known of it; empty if all machines take part.
        is_lost: the machine has fallen silent.
    """

    sentence: str = ""
    is_lost: bool = False


def find_absence(job: JobSettings, attempt: Attempt) -> Absence:
    """The first machine without which the next attempt cannot begin; to be asked by the head node at its own end."""
    if not job.hosts or job.nodes == 1:
        return Absence()
    if not attempt.has("rendezvous"):
        return Absence(f"node 0 ({job.hosts[0]}) has told the other machines no address and port")
    for node in range(1, job.nodes):
        values = read_object(f"{attempt.folder}/exit-{node:05d}.json")
        where = f"node {node} ({job.hosts[node]})"
        if not values:
            return Absence(f"{where} does not answer, and the run has no spare machine", is_lost=True)
        if values.get("stays") is not True:
            return Absence(f"{where} has left the run")
    return Absence()


def await_next(job: JobSettings, attempt: Attempt, watch: Watch) -> bool:
    """Wait for the head node's word on an attempt that has ended here; True once the next attempt has begun there.

    False after the last attempt, a signal or a cancel, or if the head node has fallen silent.
    """
    following = f"{job.attempt_dir(attempt.number + 1)}/started.json"
    sign: Tuple[str, bool] = ("", False)
    silent = 0
    while silent <= HEAD_PATIENCE_S * POLLS_PER_SECOND:
        if watch.is_over:
            return False
        ending = read_object(f"{attempt.folder}/exit.json") if "exit.json" in _names(attempt.folder) else {}
        if ending and ending.get("restarts") is not True:
            return False
        _names(f"{job.run_dir}/attempts")
        if ending and os.path.exists(following):
            return True
        found = _text(f"{attempt.folder}/beat-00000"), bool(ending)
        silent = 0 if found != sign else silent + 1
        sign = found
        time.sleep(1 / POLLS_PER_SECOND)
    tell(f"node 0 ({job.hosts[0]}) has given no sign for {HEAD_PATIENCE_S} s: no further attempt begins here")
    remove_secrets(job)
    return False


def rendezvous_of_head(job: JobSettings, attempt: Attempt, watch: Watch, *, is_first: bool) -> Sequence[str]:
    """Address and port that the head node has chosen; "-" for each if the attempt is over before its launch.

    Args:
        job: settings.
        attempt: of this machine.
        watch: of the attempt; tells the head node meanwhile that this machine lives.
        is_first: llmctl starts this machine for the attempt, after the head node has written the file.

    Raises:
        AttemptError: the head node has written no address in time, or has ended the attempt.
    """
    path = f"{attempt.folder}/rendezvous"
    deadline = time.monotonic() + (_HEAD_TIMEOUT_S if is_first and not job.in_image else _LONG_TIMEOUT_S)
    while time.monotonic() < deadline and not watch.is_over:
        words = _text(path).split()
        if len(words) == 2:
            return words
        watch.write_beat()
        time.sleep(1 / POLLS_PER_SECOND)
        # Reading the directory makes a network file system refresh its cache.
        if "exit.json" in _names(attempt.folder):
            raise AttemptError(f"the head node has ended attempt {attempt.number} before its ranks could start")
    if watch.is_over:
        return "-", "-"
    raise AttemptError(f"the head node has written no address and port to {path}")


def _names(folder: str) -> Sequence[str]:
    """List a folder: reading the directory makes a network file system refresh its cache."""
    with suppress(OSError):
        return os.listdir(folder)
    return ()


def _text(path: str) -> str:
    with suppress(OSError), open(path, errors="replace") as file:
        return file.read()
    return ""

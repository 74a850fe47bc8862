"""One attempt of a run: its number, started.json and exit.json."""

import json
import os
import shutil
import socket
import sys
import time
from contextlib import suppress
from typing import Any, Dict, Mapping, NamedTuple, Optional, Tuple

from . import processes
from .chain.links import cancelled_name, claim_name, passed_name
from .settings import JobSettings
from .trust import TrustError, check_file

_RESERVE = ".reserve"
_RESERVE_BYTES = 65536
_FOLDER_MODE, _FILE_MODE = 0o755, 0o644
"""Whatever the umask: a group that may read the run must not be able to put its records in place of these."""

_NOTHING: Mapping[str, Any] = {}


class AttemptError(Exception):
    """The attempt cannot start; the message is a sentence for the job's log."""


class NotNeededError(AttemptError):
    """A job of a chain finds that another job runs the run, or that the run was cancelled: not a failure."""


class Attempt(NamedTuple):
    """attempts/K of a run.

    Attributes:
        number: K.
        folder: directory of the attempt.
        suffix: of started.json and exit.json where every machine writes its own files; empty on the head node.
    """

    number: int
    folder: str
    suffix: str = ""

    def write(self, name: str, values: Dict[str, Any]) -> None:
        """Write a JSON file aside and rename it.

        Readers never see half of a file. A full disk does not end the run: the reserve makes room for exit.json.
        """
        aside = f"{self.folder}/.{name}"
        for is_last in (False, True):
            try:
                with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _FILE_MODE), "w") as file:
                    file.write(json.dumps(values) + "\n")
                os.replace(aside, f"{self.folder}/{name}")
                return
            except OSError as error:
                if is_last:
                    tell(f"{self.folder}/{name} cannot be written: {error.strerror}")
                with suppress(OSError):
                    os.unlink(f"{self.folder}/{_RESERVE}")

    def reserve_room(self) -> None:
        """Take the room on the disk that exit.json needs if the disk is full by then."""
        with suppress(OSError), open(f"{self.folder}/{_RESERVE}", "wb") as file:
            file.write(bytes(_RESERVE_BYTES))

    def release_room(self) -> None:
        """Give the room back."""
        with suppress(OSError):
            os.unlink(f"{self.folder}/{_RESERVE}")

    def write_started(self, submission: int, job_id: str, link: int = 1) -> None:
        """Record that this process runs the attempt, in this link of a chain of jobs."""
        pid = os.getpid()
        values = {"attempt": self.number, "submission": submission, "job_id": job_id, "host": socket.gethostname()}
        values["link"] = link
        values.update({"pid": pid, "pid_start_time": processes.start_time(pid), "boot_id": processes.boot_id()})
        values["time"] = int(time.time())
        self.write(f"started{self.suffix}.json", values)
        if not self.suffix:
            self.reserve_room()

    def write_exit(
        self, code: int, reason: str, signal: Optional[str], cause: str = "", further: Mapping[str, Any] = _NOTHING
    ) -> None:
        """Record exit code, reason and signal of the attempt, the cause of a failure as a sentence, and ``further``."""
        values = {"code": code, "reason": reason, "signal": signal, "time": int(time.time()), "cause": cause}
        self.write(f"exit{self.suffix}.json", {**values, "node": socket.gethostname(), **further})
        if not self.suffix:
            self.release_room()

    def write_alive(self) -> None:
        """Record that this process lives: if its scheduler kills it, the record dates the end.

        One write in place, of the same length: readers never see half of it, and a full disk does not matter.
        """
        with suppress(OSError):
            descriptor = os.open(f"{self.folder}/alive.json", os.O_WRONLY | os.O_CREAT, _FILE_MODE)
            try:
                os.pwrite(descriptor, json.dumps({"time": int(time.time())}).encode(), 0)
            finally:
                os.close(descriptor)

    def has(self, name: str) -> bool:
        """True if the attempt directory has a file of this name."""
        return os.path.exists(f"{self.folder}/{name}")


def claim_submission(job: JobSettings, job_id: str) -> int:
    """Make this job the only one of its submission, or the next link of its chain; returns the number of the link.

    A symbolic link decides, because only one job can create the link. A scheduler whose answer was lost may have
    accepted the job twice. A requeued job keeps its id. A job that starts after a later submission is too late. In a
    chain a job may begin only after the job before has passed the run on.

    Raises:
        AttemptError: another job owns the submission, or the run was submitted again.
        NotNeededError: the same in a chain; or the run was cancelled.
    """
    folder = f"{job.run_dir}/attempts"
    _make_folder(folder)
    refusal = AttemptError if job.chain is None else NotNeededError
    link, number, owner, names = 0, job.submission, "", [""]
    while not link or (job.chain is not None and passed_name(number, link) in names):
        if link and owner == job_id:
            raise refusal(f"job {job_id} has passed {job.run_id} on to its next job and starts nothing")
        link += 1
        claim = f"{folder}/{claim_name(number, link)}"
        with suppress(OSError):
            os.symlink(job_id, claim)
        owner = ""
        with suppress(OSError):
            owner = os.readlink(claim)
        # Reading the directory makes a network file system refresh its cache.
        names = os.listdir(folder)
    if owner not in ("", job_id):
        words = f", link {link} of its chain" if link > 1 else ""
        raise refusal(f"job {owner} already is submission {number} of {job.run_id}{words}; job {job_id} starts nothing")
    prefix = claim_name(0, 1)[:-1]
    numbers = [name[len(prefix) :] for name in names if name.startswith(prefix)]
    later = max((int(one) for one in numbers if one.isdigit()), default=0)
    if later > number:
        raise refusal(f"{job.run_id} was submitted again since (submission {later}); job {job_id} starts nothing")
    if job.chain is not None and cancelled_name(number) in names:
        remove_secrets(job)
        raise refusal(f"{job.run_id} was cancelled; job {job_id} starts nothing")
    return link


def new_attempt(job: JobSettings) -> Attempt:
    """Create the next attempt of the run.

    mkdir is atomic, so that no two jobs get the same number, even if the scheduler starts the job again.

    Raises:
        AttemptError: the directory cannot be created.
    """
    _make_folder(f"{job.run_dir}/attempts")
    number = 1
    while True:
        folder = job.attempt_dir(number)
        try:
            os.mkdir(folder, _FOLDER_MODE)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise AttemptError(f"{folder} cannot be created: {error.strerror}") from None
        else:
            _copy_into(job, folder, ("job.sh", "job.json", "config.yaml"))
            return Attempt(number, folder)


def attempt_on_machine(job: JobSettings, node: int, number: int) -> Attempt:
    """Create or open the attempt on one of several machines without a scheduler.

    Args:
        job: settings.
        node: number of this machine; 0 is the head node.
        number: of the attempt, the same on all machines.

    Raises:
        AttemptError: the head node cannot create the directory, or the directory exists already.
    """
    folder = job.attempt_dir(number)
    _make_folder(f"{job.run_dir}/attempts")
    try:
        if job.shared and node == 0:
            os.mkdir(folder, _FOLDER_MODE)
        elif not job.shared:
            os.makedirs(folder, _FOLDER_MODE, exist_ok=True)
        if node == 0 or not job.shared:
            _copy_into(job, folder, ("job.sh", "job.json"))
        if node == 0:
            _copy_into(job, folder, ("config.yaml",))
    except OSError as error:
        raise AttemptError(f"{folder} cannot be created: {error.strerror}") from None
    return Attempt(number, folder, f"-{node:05d}" if node else "")


def outcome_of_rank_0(folder: str) -> str:
    """The reason that rank 0 recorded: completed or stopped; else empty."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        with open(f"{folder}/outcome.json", encoding="utf-8", errors="replace") as file:
            return str(json.loads(file.read())["reason"])
    return ""


def read_secrets(job: JobSettings) -> Dict[str, str]:
    """Names and values of the secrets, from a file of NAME NUL VALUE NUL.

    Raises:
        AttemptError: this node does not see the file, or another user has made it.
    """
    if job.secrets_file is None:
        return {}
    try:
        if os.path.lexists(job.secrets_file):
            check_file(job.secrets_file)
        with open(job.secrets_file, "rb") as file:
            words = [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
    except TrustError as error:
        raise AttemptError(str(error)) from None
    except OSError:
        if job.secrets_are_read_once:
            raise AttemptError("the file of the secrets is gone; submit again") from None
        raise AttemptError(
            f"{socket.gethostname()} has no file of the secrets. Nodes must see {os.path.dirname(job.secrets_file)}: "
            "is runs_root on a file system that they share? If so, an earlier end of the job removed the file: "
            "submit again"
        ) from None
    return dict(zip(words[::2], words[1::2]))


def remove_secrets(job: JobSettings) -> None:
    """Remove the file of the secrets if the file exists."""
    if job.secrets_file is not None:
        with suppress(OSError):
            os.unlink(job.secrets_file)


def tell(sentence: str) -> None:
    """Write a sentence to the job's log."""
    print(f"llmctl: {sentence}", file=sys.stderr, flush=True)


def _make_folder(folder: str) -> None:
    try:
        os.makedirs(folder, _FOLDER_MODE, exist_ok=True)
    except OSError as error:
        raise AttemptError(f"{folder} cannot be created: {error.strerror}") from None


def _copy_into(job: JobSettings, folder: str, names: Tuple[str, ...]) -> None:
    for name in names:
        with suppress(FileNotFoundError):
            shutil.copy(f"{job.run_dir}/{name}", folder)

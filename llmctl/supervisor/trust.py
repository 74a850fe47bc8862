"""Check that a job runs only its user's own files, as they were submitted. Standard library only, Python 3.6.

Other users may write to runs_root. A file is trusted if its owner is this user or root, if nobody else may write to it,
and if nobody else can put another file in its place. The supervisor calls these functions when a job starts, llmctl
when it resumes or cancels a run. An access control list shows in the mode's group bits: they are its mask (acl(5)).
"""

import hashlib
import json
import os
import pwd
import re
import stat
from typing import Callable, List, Mapping, Optional, Tuple

CHECKSUMS = "sha256sums"
"""Files of a run, one per submission, with the sha256 of all that the job runs, for ``sha256sum --check``."""
OWN_FOLDER = "own"
"""Link of a run to the folder beside the runs that belongs to the user: code, caches, secrets."""
SECRETS_FOLDER = "secrets"
"""Folder in it with a file RUN.SUBMISSION for the secrets of each submission."""
_SECRETS = re.compile(r"([A-Za-z0-9].*)\.\d+|\.([A-Za-z0-9].*)\.\d+\.[0-9a-f]{12}")
"""Such a file, or the temporary file with which llmctl writes it."""
_SETTINGS = ("run.json", "job.sh", "job.json", "config.yaml")
_CHANGED = "was changed after the submission; restore the file, or submit the run again"
OTHERS_WRITE = 0o022


class TrustError(Exception):
    """A file that must not be run or believed; the message names file and owner."""


class MissingError(TrustError):
    """A file that was submitted and is gone."""


def why_distrusted(run_dir: str, contents: Optional[Tuple[int, str]] = None) -> str:
    """A sentence about a run whose files another user has made or may change; empty for a run to be trusted.

    Args:
        run_dir: folder of the run, on this machine.
        contents: number of a submission and the sha256 of its checksums, to compare the code; None: not compared.
    """
    try:
        _check_run(run_dir)
        if contents is not None:
            check_contents(run_dir, *contents, below="code/")
    except MissingError:
        return ""  # nothing to distrust; the caller looks for what it needs
    except TrustError as error:
        return str(error)
    return ""


def check_submission(run_dir: str, submission: int) -> None:
    """Check all that a job is about to run, and the folder of the runs.

    Raises:
        TrustError: a file belongs to another user, who may also be able to change or replace it; or it is not the file
            that was submitted.
    """
    check_root(os.path.dirname(run_dir))
    check_root(os.path.dirname(os.path.realpath(run_dir)))
    _check_run(run_dir)
    digest = _digest_in_record(run_dir, submission)
    check_contents(run_dir, submission, digest)


def _check_run(run_dir: str) -> None:
    """Check the owners and modes of a run's folder, its settings and its code."""
    if os.path.islink(run_dir):
        _check_owner(run_dir, os.lstat(run_dir))
    home = os.path.realpath(run_dir)
    check_folder(home)
    for path in (f"{home}/{name}" for name in _SETTINGS):
        if os.path.lexists(path):
            check_file(path)
    if os.path.lexists(f"{home}/code"):
        _check_code(f"{home}/code", os.path.dirname(home))


def _digest_in_record(run_dir: str, submission: int) -> str:
    path = f"{run_dir}/run.json"
    try:
        record = json.loads(_read(path).decode())
        if record["run_id"] != os.path.basename(run_dir):
            raise TrustError(f"{path} is the record of another run, {record['run_id']}")
        return str(next(one["contents"] for one in record["submissions"] if one["number"] == submission))
    except (ValueError, KeyError, TypeError, StopIteration):
        raise TrustError(f"{path} has no submission {submission}") from None


def check_contents(run_dir: str, submission: int, digest: str, *, below: str = "") -> None:
    """Check that the files of a run are those that were submitted.

    The caller has checked their owners.

    Args:
        run_dir: folder of the run.
        submission: number of the submission.
        digest: sha256 of its file of checksums, from the record.
        below: check only names that begin so.

    Raises:
        TrustError: a file has changed, is missing, or cannot be read.
    """
    path = checksums_file(run_dir, submission)
    sums = _read(path)
    if hashlib.sha256(sums).hexdigest() != digest:
        raise TrustError(f"{path} {_CHANGED}")
    for expected, name in parse_checksums(sums):
        if name.startswith(below) and hashlib.sha256(_read(f"{run_dir}/{name}")).hexdigest() != expected:
            raise TrustError(f"{run_dir}/{name} {_CHANGED}")


def checksums_file(run_dir: str, submission: int) -> str:
    """Path of the checksums of one submission. Never overwritten by the next: its record may not be written yet."""
    return f"{run_dir}/{CHECKSUMS}.{submission}"


def parse_checksums(data: bytes) -> List[Tuple[str, str]]:
    """Pairs of sha256 and name from the bytes of a file of checksums."""
    return [(line[:64].decode("ascii", "replace"), os.fsdecode(line[66:])) for line in data.split(b"\n") if line]


def checksums_bytes(checksums: Mapping[str, str]) -> bytes:
    """Content of a file of checksums: lines of sha256, two spaces, and name. Names must not hold line breaks."""
    return b"".join([found.encode() + b"  " + os.fsencode(name) + b"\n" for name, found in sorted(checksums.items())])


def check_root(runs_root: str) -> None:
    """Check that no other user can rename a folder of this user in the folder of the runs.

    Raises:
        TrustError: others may write to the folder, which has no sticky bit.
    """
    facts = os.stat(runs_root)
    if facts.st_mode & OTHERS_WRITE and not facts.st_mode & stat.S_ISVTX:
        raise TrustError(
            "{0} has no sticky bit: others who may write there can put their files in place of yours "
            "(owner {1}, mode {2}). Ask {1} for: chmod +t {0}".format(
                runs_root, user_name(facts.st_uid), _mode(facts.st_mode)
            )
        )


def left_secrets(own: str, runs_root: str) -> List[str]:
    """Files of secrets of runs that have no folder any more: nothing else knows of them.

    A run has its folder before its secrets are written, so secrets on their way to a job are not among them.

    Args:
        own: the folder beside the runs that belongs to this user, checked before.
        runs_root: folder of the runs.
    """
    folder = f"{own}/{SECRETS_FOLDER}"
    try:
        check_folder(folder)
        names = sorted(os.listdir(folder))
    except (TrustError, OSError):
        return []
    matches = [(name, _SECRETS.fullmatch(name)) for name in names]
    return [f"{folder}/{name}" for name, found in matches if found and _is_gone(f"{runs_root}/{found[1] or found[2]}")]


def _is_gone(path: str) -> bool:
    """True if a path is certainly absent; a folder that cannot be searched proves nothing."""
    try:
        _lstat(path)
    except MissingError:
        return True
    except TrustError:
        return False
    return False


def user_name(uid: int) -> str:
    """Name of a user, or its number where this machine does not know the name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return "user {}".format(uid)


def is_trusted_owner(uid: int) -> bool:
    """True for this user and for root, who can do anything."""
    return uid in (0, os.geteuid())


def _check_code(code: str, root: str) -> None:
    """Check a run's code: its own folder, and links to the folder of the user beside the runs."""
    check_folder(code)
    for name in sorted(os.listdir(code)):
        path = f"{code}/{name}"
        target = os.path.realpath(path)
        parts = os.path.relpath(target, root).split(os.sep)
        if parts[0] == os.pardir:
            raise TrustError(f"{path} leads to {target}, which is not below {root}")
        for count in range(1, len(parts)):
            check_folder(os.path.join(root, *parts[:count]))
        _check_tree(target)


def _check_tree(path: str) -> None:
    if not stat.S_ISDIR(_lstat(path).st_mode):
        check_file(path)
        return
    check_folder(path)
    for name in sorted(os.listdir(path)):
        _check_tree(f"{path}/{name}")


def check_folder(path: str) -> None:
    """Check that a path is a folder that only this user or root can write to.

    Raises:
        TrustError: names the folder and its owner.
    """
    _check_kind(path, stat.S_ISDIR, "a folder")


def check_file(path: str) -> None:
    """Check that a path is a plain file that only this user or root can have written.

    Raises:
        TrustError: names the file and its owner.
    """
    _check_kind(path, stat.S_ISREG, "a file")


def _check_kind(path: str, is_kind: Callable[[int], bool], kind: str) -> None:
    facts = _lstat(path)
    if not is_kind(facts.st_mode):
        raise TrustError(f"{path} is {_kind(facts.st_mode)} of {user_name(facts.st_uid)}, not {kind}")
    _check_owner(path, facts)


def _check_owner(path: str, facts: os.stat_result) -> None:
    if not is_trusted_owner(facts.st_uid):
        raise TrustError(f"{path} belongs to {user_name(facts.st_uid)}, not to you")
    if facts.st_mode & OTHERS_WRITE and not stat.S_ISLNK(facts.st_mode):
        raise TrustError(f"{path} can be changed by others: its mode is {_mode(facts.st_mode)}")


def _lstat(path: str) -> os.stat_result:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        raise MissingError(f"{path} is missing") from None
    except OSError as error:
        raise TrustError(f"{path}: {error.strerror}") from None


def _read(path: str) -> bytes:
    """Content of a plain file, which cannot be a pipe that never answers."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise TrustError(f"{path} is not a file")
            return file.read()
    except FileNotFoundError:
        raise MissingError(f"{path} is missing") from None
    except OSError as error:
        raise TrustError(f"{path}: {error.strerror}") from None


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISLNK, "a symbolic link"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISDIR, "a folder"))
    return next((word for is_kind, word in kinds if is_kind(mode)), "a special file")


def _mode(mode: int) -> str:
    return "{:04o}".format(stat.S_IMODE(mode))

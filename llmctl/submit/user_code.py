"""Copy of the user's project that goes with a run: the files that ``job.code`` names."""

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmctl.errors import ConfigFileError
from llmctl.submit.bundled_code import LEFT_OUT
from llmctl.transport.protocol import Transport

LIMIT_MB = 50
_GIT_TIMEOUT_S = 60
_IS_TRAINER = re.compile(r"trainer(/|\.py$|\.[\w.-]*so$)")
"""A file below code/user that Python would import as ``trainer``, or as a part of it."""


@dataclass(frozen=True)
class UserCode:
    """Copy of the user's project.

    Attributes:
        files: (path, name below code/user) of each file.
        commit: of the project's git repository; None without a repository.
        diff: sha256 of the changes since that commit, untracked files included; None without changes.
    """

    files: tuple[tuple[Path, str], ...] = ()
    commit: str | None = None
    diff: str | None = None


def find_user_code(paths: Sequence[str], transport: Transport, *, trains: bool = False) -> UserCode:
    """The files that ``job.code`` names; of a git repository all files except the ignored ones.

    A folder's own name is kept below code/user, so that ``code: [mypkg]`` is imported as ``mypkg``; with a
    trailing ``/.`` its content is copied there directly.

    Args:
        paths: of files and folders.
        transport: this machine.
        trains: True for a training run, whose program is our package ``trainer``.

    Raises:
        ConfigFileError: a path is missing, two files have the same name, a module of a training run has the name of our
            own, or the files exceed the limit.
        SchedulerError: git does not answer.
    """
    named: dict[str, Path] = {}
    state = hashlib.sha256()
    commits = []
    for text in paths:
        root = Path(os.path.normpath(text))
        if not root.exists():
            raise ConfigFileError(f"job.code: there is no {root}; name files and folders of your project")
        prefix = "" if text.endswith("/.") else root.name
        listed, commit, changed = _list_project(root, transport)
        commits.append(commit)
        state.update(changed)
        for path in listed:
            name = (Path(prefix) / path.relative_to(root)).as_posix() if path != root else root.name
            # Two projects may have files of the same name.
            if named.setdefault(name, path) != path:
                raise ConfigFileError(f"job.code: {path} and {named[name]} would both become code/user/{name}")
    hidden = next((name for name in sorted(named) if trains and _IS_TRAINER.match(name)), None)
    if hidden is not None:
        raise ConfigFileError(
            f"job.code: {named[hidden]} would be imported as the module trainer, which is the name of the training "
            "program itself; rename yours, or leave it out of job.code"
        )
    megabytes = sum(path.stat().st_size for path in named.values()) / 1e6
    if megabytes > LIMIT_MB:
        raise ConfigFileError(
            f"job.code: {megabytes:.0f} MB in {len(named)} files, above the limit of {LIMIT_MB} MB; "
            "name only the code, or let git ignore the rest"
        )
    # sha256sums has one file per line.
    broken = next((name for name in named if "\n" in name), None)
    if broken is not None:
        raise ConfigFileError(f"job.code: {broken!r} has a line break in its name; rename the file")
    commit = next((commit for commit in commits if commit), None)
    diff = state.hexdigest() if state.digest() != hashlib.sha256().digest() else None
    return UserCode(tuple((path, name) for name, path in sorted(named.items())), commit, diff)


def _list_project(root: Path, transport: Transport) -> tuple[list[Path], str | None, bytes]:
    """Files below ``root``, the checked-out commit, and the changes since that commit as bytes."""
    folder = root if root.is_dir() else root.parent
    git = ["git", "-C", str(folder)]
    top = (
        transport.run([*git, "rev-parse", "--show-toplevel"], timeout_s=_GIT_TIMEOUT_S) if shutil.which("git") else None
    )
    if top is None or top.exit_status != 0:
        return list(_files(root)), None, b""
    where = str(root)
    listed = transport.run(
        [*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--full-name", "--", where],
        timeout_s=_GIT_TIMEOUT_S,
    )
    names = [name for name in listed.stdout.split("\0") if name]
    # Deleted but still in git's index, or a submodule's folder: nothing to copy.
    files = sorted({path for path in (Path(top.stdout.strip()) / name for name in names) if path.is_file()})
    real = root.resolve()
    files = [root / path.resolve().relative_to(real) if path.resolve() != real else root for path in files]
    head = transport.run([*git, "rev-parse", "HEAD"], timeout_s=_GIT_TIMEOUT_S)
    commit = head.stdout.strip() if head.exit_status == 0 else None
    return files, commit, _changes(git, where, commit, transport)


def _changes(git: list[str], where: str, commit: str | None, transport: Transport) -> bytes:
    others = transport.run(
        [*git, "ls-files", "-z", "--others", "--exclude-standard", "--", where], timeout_s=_GIT_TIMEOUT_S
    ).stdout
    untracked = "".join(
        f"{name}\0{hashlib.sha256((Path(git[2]) / name).read_bytes()).hexdigest()}\n"
        for name in others.split("\0")
        if name
    )
    against = [commit] if commit else ["--cached"]
    diff = transport.run([*git, "diff", "--binary", *against, "--", where], timeout_s=_GIT_TIMEOUT_S).stdout
    return (diff + untracked).encode()


def _files(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    for path in sorted(root.iterdir()):
        if path.name in LEFT_OUT or path.suffix == ".pyc":
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _files(path)
        elif path.is_file():
            yield path

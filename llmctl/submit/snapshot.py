"""Code of a run: llmctl's own trainer and supervisor, and a snapshot of the user's project.

Our own code is content-addressed: ``<runs_root>/.code/<user>/<sha256>/{trainer,csrc}`` and ``<sha256>/supervisor``,
written once and linked from every run that uses it. Each user of a shared runs_root has a folder that nobody else can
write to, because a run executes what is in it. Transport.put_tree writes aside and renames, so that nobody sees half a
snapshot.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmctl.errors import ConfigFileError
from llmctl.paths import BUNDLED, PACKAGE, TRAINER
from llmctl.transport.protocol import Transport

LIMIT_MB = 50
_NEVER = frozenset({"__pycache__", ".git"})
_GIT_TIMEOUT_S = 60


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


def send_code(run_dir: Path, user_code: UserCode | None, transport: Transport, *, with_trainer: bool) -> str | None:
    """Fill ``<run_dir>/code`` of a new run: the user's project, and links to the supervisor and the trainer.

    Args:
        run_dir: of the run, which exists.
        user_code: the user's project; None without ``job.code``.
        transport: to the machine of the run.
        with_trainer: False to leave out our own trainer.

    Returns:
        The content address of the trainer's snapshot; None without a snapshot.

    Raises:
        OSError: the code cannot be written.
    """
    trees = [_supervisor_code(), *([_trainer_code()] if with_trainer else [])]
    own = _own_folder(run_dir.parent, transport)
    folders = [own / digest(files) for files in trees]
    links: dict[str, str] = {}
    for folder, files in zip(folders, trees, strict=True):
        links |= _links(run_dir, folder, files)
    for folder, files in zip(folders, trees, strict=True):
        transport.put_tree(str(folder), files)
    if user_code is None:
        transport.make_folder(f"{run_dir}/code/user")
    else:
        transport.put_tree(f"{run_dir}/code/user", {name: path for path, name in user_code.files})
    transport.link(links)
    return folders[1].name if with_trainer else None


def link_supervisor(run_dir: Path, transport: Transport) -> None:
    """Link a resumed run to the supervisor of this llmctl, which fits the new job.sh.

    Raises:
        OSError: the supervisor cannot be written.
    """
    files = _supervisor_code()
    folder = _store(run_dir.parent, files, transport)
    transport.link(_links(run_dir, folder, files))


def store_trainer(runs_root: Path, transport: Transport) -> Path:
    """Store the trainer's snapshot on a machine unless it exists; returns its folder, named by its content address.

    Raises:
        OSError: the snapshot cannot be written.
    """
    return _store(runs_root, _trainer_code(), transport)


def store_supervisor(runs_root: Path, transport: Transport) -> Path:
    """Store the supervisor of job.sh on a machine unless it exists; returns its folder.

    Raises:
        OSError: the supervisor cannot be written.
    """
    return _store(runs_root, _supervisor_code(), transport) / "supervisor"


def digest(files: dict[str, Path]) -> str:
    """sha256 over names and contents."""
    total = hashlib.sha256()
    for name, path in sorted(files.items()):
        total.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def _store(runs_root: Path, files: dict[str, Path], transport: Transport) -> Path:
    folder = _own_folder(runs_root, transport) / digest(files)
    transport.put_tree(str(folder), files)
    return folder


def _own_folder(runs_root: Path, transport: Transport) -> Path:
    """The folder of this user's code, which nobody else can write to."""
    own = runs_root / ".code" / (Path(transport.home()).name or "root")
    transport.make_own_folder(str(own))
    return own


def _links(run_dir: Path, folder: Path, files: dict[str, Path]) -> dict[str, str]:
    """Links from ``<run_dir>/code`` to stored code, relative so that runs_root can move: path -> target."""
    names = dict.fromkeys(name.partition("/")[0] for name in files)
    return {f"{run_dir}/code/{name}": f"../../.code/{folder.parent.name}/{folder.name}/{name}" for name in names}


def _trainer_code() -> dict[str, Path]:
    return {**_code_below(TRAINER), **_code_below(BUNDLED / "csrc")}


def _supervisor_code() -> dict[str, Path]:
    return _code_below(PACKAGE / "supervisor")


def _code_below(root: Path) -> dict[str, Path]:
    """Files of a folder: name, which begins with the folder's own name -> path."""
    return {f"{root.name}/{path.relative_to(root).as_posix()}": path for path in _files(root)}


def find_user_code(paths: Sequence[str], transport: Transport) -> UserCode:
    """The files that ``job.code`` names; of a git repository all files except the ignored ones.

    A folder's own name is kept below code/user, so that ``code: [mypkg]`` is imported as ``mypkg``; with a
    trailing ``/.`` its content is copied there directly.

    Raises:
        ConfigFileError: a path is missing, two files have the same name, or the files exceed the limit.
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
            if named.setdefault(name, path) != path:
                raise ConfigFileError(f"job.code: {path} and {named[name]} would both become code/user/{name}")
    megabytes = sum(path.stat().st_size for path in named.values()) / 1e6
    if megabytes > LIMIT_MB:
        raise ConfigFileError(
            f"job.code: {megabytes:.0f} MB in {len(named)} files, above the limit of {LIMIT_MB} MB; "
            "name only the code, or let git ignore the rest"
        )
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
        if path.name in _NEVER or path.suffix == ".pyc":
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _files(path)
        elif path.is_file():
            yield path

"""Code of a run: llmctl's own trainer and supervisor, and a snapshot of the user's project.

Our own code is content-addressed: ``<runs_root>/.llmctl-<uid>/code/<sha256>/{trainer,csrc}`` and
``<sha256>/supervisor``, written once and linked from every run that uses it. Each user of a shared runs_root has such a
folder, which nobody else can write to or rename, because a run executes what is in it. Transport.put_tree writes aside
and renames, so that nobody sees half a snapshot.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmctl.errors import ConfigFileError
from llmctl.paths import BUNDLED, PACKAGE, TRAINER
from llmctl.runs.record import RunRecord
from llmctl.supervisor.trust import OWN_FOLDER, checksums_bytes, checksums_file, parse_checksums
from llmctl.transport.file_reads import FileRead
from llmctl.transport.file_writes import FileWrite
from llmctl.transport.protocol import Transport

LIMIT_MB = 50
_MOST_BYTES = 1 << 26
"""Of a file of checksums: half a million files."""
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


@dataclass(frozen=True)
class SentCode:
    """Code in a run directory.

    Attributes:
        trainer: content address of the trainer's snapshot; None without a snapshot.
        checksums: name below the run directory -> sha256 of each file.
    """

    trainer: str | None
    checksums: Mapping[str, str]


def send_code(
    run_dir: Path, user_code: UserCode | None, transport: Transport, own: str, *, with_trainer: bool
) -> SentCode:
    """Fill ``<run_dir>/code`` of a new run: the user's project, and links to the supervisor and the trainer.

    Args:
        run_dir: of the run, which exists.
        user_code: the user's project; None without ``job.code``.
        transport: to the machine of the run.
        own: name of the user's own folder beside the runs, which exists.
        with_trainer: False to leave out our own trainer.

    Raises:
        OSError: the code cannot be written.
    """
    trees = [_supervisor_code(), *([_trainer_code()] if with_trainer else [])]
    links = {f"{run_dir}/{OWN_FOLDER}": f"../{own}"}
    sums: dict[str, str] = {}
    address = None
    for files in trees:
        found = _checksums(files)
        address = _address(found)
        links |= _links(run_dir, address, files)
        sums |= found
        transport.put_tree(f"{run_dir.parent}/{own}/code/{address}", files)
    project = {name: path for path, name in user_code.files} if user_code is not None else {}
    if user_code is None:
        transport.make_folder(f"{run_dir}/code/user", mode=0o755)
    else:
        transport.put_tree(f"{run_dir}/code/user", project)
    sums |= {f"user/{name}": found for name, found in _checksums(project).items()}
    transport.link(links)
    return SentCode(address if with_trainer else None, {f"code/{name}": found for name, found in sums.items()})


def link_supervisor(run_dir: Path, transport: Transport, own: str) -> dict[str, str]:
    """Link a resumed run to the supervisor of this llmctl, which fits the new job.sh.

    Returns:
        Name below the run directory -> sha256 of each file of the supervisor.

    Raises:
        OSError: the supervisor cannot be written.
    """
    files = _supervisor_code()
    found = _checksums(files)
    transport.put_tree(f"{run_dir.parent}/{own}/code/{_address(found)}", files)
    transport.link({f"{run_dir}/{OWN_FOLDER}": f"../{own}", **_links(run_dir, _address(found), files)})
    return {f"code/{name}": value for name, value in found.items()}


def sent_before(record: RunRecord, transport: Transport) -> dict[str, str]:
    """Checksums of the code that earlier submissions of a run have sent, except those of the supervisor.

    Empty for a run of an older llmctl, which kept no checksums.
    """
    last = record.submissions[-1] if record.submissions else None
    if last is None or last.contents is None:
        return {}
    (part,) = transport.read_parts([FileRead(checksums_file(str(record.run_dir), last.number), limit=_MOST_BYTES)])
    before = parse_checksums(part.data) if part is not None else []
    kept = ("code/trainer/", "code/csrc/", "code/user/")
    return {name: found for found, name in before if name.startswith(kept)}


def checksums_of(
    run_dir: Path, submission: int, code: Mapping[str, str], files: Sequence[FileWrite]
) -> tuple[FileWrite, str]:
    """The file of checksums of all that a job runs, and its own sha256.

    Args:
        run_dir: of the run.
        submission: number of the submission.
        code: name below the run directory -> sha256.
        files: of the run directory; files elsewhere, such as secrets, are left out.
    """
    sums = dict(code)
    for file in files:
        if file.path.startswith(f"{run_dir}/") and file.path.count("/") == str(run_dir).count("/") + 1:
            sums[file.path.rpartition("/")[2]] = hashlib.sha256(file.data).hexdigest()
    data = checksums_bytes(sums)
    return FileWrite(checksums_file(str(run_dir), submission), data), hashlib.sha256(data).hexdigest()


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


def _store(runs_root: Path, files: dict[str, Path], transport: Transport) -> Path:
    own, _ = transport.make_own_folder(str(runs_root))
    folder = runs_root / own / "code" / _address(_checksums(files))
    transport.put_tree(str(folder), files)
    return folder


def _checksums(files: Mapping[str, Path]) -> dict[str, str]:
    """sha256 of each file, by name."""
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(files.items())}


def _address(checksums: Mapping[str, str]) -> str:
    """Content address: sha256 over names and contents."""
    lines = (f"{name}\0{found}\n" for name, found in checksums.items())
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _links(run_dir: Path, address: str, files: Mapping[str, Path]) -> dict[str, str]:
    """Links from ``<run_dir>/code`` to stored code, relative so that runs_root can move: path -> target."""
    names = dict.fromkeys(name.partition("/")[0] for name in files)
    return {f"{run_dir}/code/{name}": f"../{OWN_FOLDER}/code/{address}/{name}" for name in names}


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
        if path.name in _NEVER or path.suffix == ".pyc":
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _files(path)
        elif path.is_file():
            yield path

"""Code of a run: llmctl's own trainer and supervisor, and a snapshot of the user's project.

Our own code is content-addressed: ``<runs_root>/.llmctl-<uid>/code/<sha256>/{trainer,csrc}`` and
``<sha256>/supervisor``, written once and linked from every run that uses it. Each user of a shared runs_root has such a
folder, which nobody else can write to or rename, because a run executes what is in it. Transport.put_tree writes aside
and renames, so that nobody sees half a snapshot.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmctl.paths import UserFolders
from llmctl.runs.record import RunRecord
from llmctl.submit.bundled_code import CodeTree, checksums_of, supervisor_code, trainer_code
from llmctl.submit.user_code import UserCode
from llmctl.supervisor.trust import OWN_FOLDER, checksums_bytes, checksums_file, parse_checksums
from llmctl.transport.file_reads import FileRead
from llmctl.transport.file_writes import FileWrite
from llmctl.transport.protocol import Transport

_MOST_BYTES = 1 << 26
"""Of a file of checksums: half a million files."""


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
    run_dir: Path,
    user_code: UserCode | None,
    transport: Transport,
    own: str,
    folders: UserFolders,
    *,
    with_trainer: bool,
) -> SentCode:
    """Fill ``<run_dir>/code`` of a new run: the user's project, and links to the supervisor and the trainer.

    Args:
        run_dir: of the run, which exists.
        user_code: the user's project; None without ``job.code``.
        transport: to the machine of the run.
        own: name of the user's own folder beside the runs, which exists.
        folders: of the user, for the memory of checksums.
        with_trainer: False to leave out our own trainer.

    Raises:
        OSError: the code cannot be written.
    """
    trees = [supervisor_code(folders), *([trainer_code(folders)] if with_trainer else [])]
    links = {f"{run_dir}/{OWN_FOLDER}": f"../{own}"}
    sums: dict[str, str] = {}
    address = None
    for tree in trees:
        address = tree.address
        links |= _links(run_dir, tree)
        sums |= tree.checksums
        transport.put_tree(f"{run_dir.parent}/{own}/code/{address}", tree.files)
    project = {name: path for path, name in user_code.files} if user_code is not None else {}
    if user_code is None:
        transport.make_folder(f"{run_dir}/code/user", mode=0o755)
    else:
        transport.put_tree(f"{run_dir}/code/user", project)
    sums |= {f"user/{name}": found for name, found in checksums_of(project).items()}
    transport.link(links)
    return SentCode(address if with_trainer else None, {f"code/{name}": found for name, found in sums.items()})


def link_supervisor(run_dir: Path, transport: Transport, own: str, folders: UserFolders) -> dict[str, str]:
    """Link a resumed run to the supervisor of this llmctl, which fits the new job.sh.

    Returns:
        Name below the run directory -> sha256 of each file of the supervisor.

    Raises:
        OSError: the supervisor cannot be written.
    """
    tree = supervisor_code(folders)
    transport.put_tree(f"{run_dir.parent}/{own}/code/{tree.address}", tree.files)
    transport.link({f"{run_dir}/{OWN_FOLDER}": f"../{own}", **_links(run_dir, tree)})
    return {f"code/{name}": value for name, value in tree.checksums.items()}


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


def contents_of(
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


def store_trainer(runs_root: Path, transport: Transport, folders: UserFolders) -> Path:
    """Store the trainer's snapshot on a machine unless it exists; returns its folder, named by its content address.

    Raises:
        OSError: the snapshot cannot be written.
    """
    return _store(runs_root, trainer_code(folders), transport)


def store_supervisor(runs_root: Path, transport: Transport, folders: UserFolders) -> Path:
    """Store the supervisor of job.sh on a machine unless it exists; returns its folder.

    Raises:
        OSError: the supervisor cannot be written.
    """
    return _store(runs_root, supervisor_code(folders), transport) / "supervisor"


def _store(runs_root: Path, tree: CodeTree, transport: Transport) -> Path:
    own, _ = transport.make_own_folder(str(runs_root))
    folder = runs_root / own / "code" / tree.address
    transport.put_tree(str(folder), tree.files)
    return folder


def _links(run_dir: Path, tree: CodeTree) -> dict[str, str]:
    """Links from ``<run_dir>/code`` to stored code, relative so that runs_root can move: path -> target."""
    names = {name.partition("/")[0] for name in tree.files}
    return {f"{run_dir}/code/{name}": f"../{OWN_FOLDER}/code/{tree.address}/{name}" for name in sorted(names)}

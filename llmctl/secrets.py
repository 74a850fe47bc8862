"""Values of secrets on their way to a job: one 0600 file outside the run directory, read once by job.sh and removed.

Only names appear in scripts, records, argv and messages. The format is NAME NUL VALUE NUL, which a shell can read
without evaluating anything.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from llmctl.errors import UsageError
from llmctl.file_acts import FileWrite, write_files
from llmctl.resources import UserFolders


def secrets_file(folders: UserFolders, run_id: str, submission: int) -> Path:
    """Where the values for one submission stand until the job has read them."""
    return folders.secrets / f"{run_id}.{submission}"


def check_secrets(names: Sequence[str], environ: Mapping[str, str]) -> None:
    """Refuse names that have no value.

    Raises:
        UsageError: names the first that is not set.
    """
    missing = next((name for name in names if name not in environ), None)
    if missing is not None:
        raise UsageError(f"--secret {missing}: is not set in your environment; export it first, its value goes along")


def write_secrets(path: Path, names: Sequence[str], environ: Mapping[str, str]) -> None:
    """Write the values for job.sh.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = "".join(f"{name}\0{environ[name]}\0" for name in names)
    write_files([FileWrite(str(path), text.encode("utf-8", "surrogateescape"))])

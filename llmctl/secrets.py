"""Values of secrets on their way to a job: one 0600 file outside the run directory, on a file system the nodes share.

The supervisor on every node reads it; that of the head removes it at its end.

Only names appear in scripts, records, argv and messages. The format is NAME NUL VALUE NUL, which a shell can read
without evaluating anything.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from llmctl.errors import UsageError
from llmctl.invocation import Invocation, is_remote
from llmctl.profile import ClusterProfile

FOLDER = ".secrets"
"""Beside the runs: what is below runs_root every node sees and may change, which a home directory need not be."""


def secrets_file(invocation: Invocation, profile: ClusterProfile, run_dir: Path, submission: int) -> str:
    """Where the values for one submission stand, on the cluster's machine, until the job has ended.

    On this machine that is the user's own state folder. On a cluster it is a folder of the user alone beside the run
    directories; hosts that share no files have one each.
    """
    if profile.scheduler == "local" and not is_remote(profile):
        return f"{invocation.folders.secrets}/{run_dir.name}.{submission}"
    return f"{run_dir.parent}/{FOLDER}/{run_dir.name}.{submission}"


def check_secrets(names: Sequence[str], environ: Mapping[str, str]) -> None:
    """Refuse names that have no value.

    Raises:
        UsageError: names the first that is not set.
    """
    missing = next((name for name in names if name not in environ), None)
    if missing is not None:
        raise UsageError(f"--secret {missing}: is not set in your environment; export it first, its value goes along")


def secrets_bytes(names: Sequence[str], environ: Mapping[str, str]) -> bytes:
    """The values as the supervisor reads them."""
    return "".join(f"{name}\0{environ[name]}\0" for name in names).encode("utf-8", "surrogateescape")

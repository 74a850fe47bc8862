"""Values of secrets on their way to a job: one 0600 file outside the run directory, on a file system the nodes share.

Every node's job.sh reads it itself; that of the head removes it at its end.

Only names appear in scripts, records, argv and messages. The format is NAME NUL VALUE NUL, which a shell can read
without evaluating anything.
"""

from collections.abc import Mapping, Sequence

from llmctl.errors import UsageError
from llmctl.invocation import Invocation, is_remote
from llmctl.profile import ClusterProfile


def secrets_file(invocation: Invocation, profile: ClusterProfile, run_id: str, submission: int) -> str:
    """Where the values for one submission stand, on the cluster's machine, until the job has ended.

    On this machine XDG_STATE_HOME is honoured; a nodes' file system that does not show the home directory needs that.

    Raises:
        SchedulerError: the machine cannot be asked for the home directory.
    """
    folder = str(invocation.folders.secrets)
    if is_remote(profile):
        folder = f"{invocation.connect(profile).home()}/.local/state/llmctl/secrets"
    return f"{folder}/{run_id}.{submission}"


def check_secrets(names: Sequence[str], environ: Mapping[str, str]) -> None:
    """Refuse names that have no value.

    Raises:
        UsageError: names the first that is not set.
    """
    missing = next((name for name in names if name not in environ), None)
    if missing is not None:
        raise UsageError(f"--secret {missing}: is not set in your environment; export it first, its value goes along")


def secrets_bytes(names: Sequence[str], environ: Mapping[str, str]) -> bytes:
    """The values as job.sh reads them."""
    return "".join(f"{name}\0{environ[name]}\0" for name in names).encode("utf-8", "surrogateescape")

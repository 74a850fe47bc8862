"""The python3 of a cluster's nodes, which runs the supervisor of jobs."""

from llmctl.backends import capabilities_of
from llmctl.site.profile import ClusterProfile
from llmctl.transport.protocol import Transport

LOOK = (
    "for python in python3 /usr/libexec/platform-python; do "
    '"$python" -c "import sys; sys.exit(sys.version_info < (3, 6))" 2>/dev/null && exec "$python" --version; '
    "done; exit 1"
)
"""Shell line: prints the version of the python3 that job.sh would take, as templates/_supervisor.sh.j2 looks for it."""
_TIMEOUT_S = 60.0
MEND = "ask the site for a python3 of version 3.6 or later on its nodes"
"""Remedy where nodes have no python3."""


def warn_of_node_python(profile: ClusterProfile, transport: Transport, *, is_command: bool, in_container: bool) -> str:
    """A sentence if a job may find no Python for its supervisor; else empty.

    Args:
        profile: of the cluster.
        transport: to the machine that the job is submitted from.
        is_command: the job runs a COMMAND, which needs no Python environment.
        in_container: the job runs in an image, whose Python is no use outside.

    Raises:
        SchedulerError: the machine does not answer.
    """
    has_environment = profile.environment.kind in ("venv", "conda") or profile.environment.python is not None
    if capabilities_of(profile.scheduler).starts_in_place or not (is_command or in_container):
        return ""
    if has_environment and not in_container:
        return ""
    if transport.run(["sh", "-c", LOOK], timeout_s=_TIMEOUT_S).exit_status == 0:
        return ""
    return (
        f"{transport.host} has no python3 of version 3.6 or later, which starts the ranks; if the nodes have none: "
        f"{MEND}"
    )

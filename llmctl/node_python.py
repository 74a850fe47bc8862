"""The python3 of a cluster's nodes, which runs the supervisor of jobs."""

from llmctl.doctor_probes import Section
from llmctl.doctor_python import Check
from llmctl.hands import Hands
from llmctl.profile import ClusterProfile

LOOK = (
    "for python in python3 /usr/libexec/platform-python; do "
    '"$python" -c "import sys; sys.exit(sys.version_info < (3, 6))" 2>/dev/null && exec "$python" --version; '
    "done; exit 1"
)
"""Shell line: prints the version of the python3 that job.sh would take, as templates/_supervisor.sh.j2 looks for it."""
_TIMEOUT_S = 60.0
_MEND = "ask the site for a python3 of version 3.6 or later on its nodes"


def judge_node_python(profile: ClusterProfile, section: Section) -> Check:
    """The line of ``llmctl doctor`` on the supervisor's Python.

    Args:
        profile: of the cluster.
        section: what LOOK answered.
    """
    if section.status == 0:
        return Check("supervisor", "ok", f"runs with {section.text.strip()}, if nodes have the same as this one")
    if profile.environment.kind == "container":
        return Check("supervisor", "warning", "no python3 of version 3.6 or later outside of the image", _MEND)
    return Check("supervisor", "note", "no python3 of version 3.6 or later: jobs take that of the environment")


def remark_on_node_python(profile: ClusterProfile, hands: Hands, *, is_command: bool, in_container: bool) -> str:
    """A sentence if a job may find no Python for its supervisor; else empty.

    Args:
        profile: of the cluster.
        hands: the machine that the job is submitted from.
        is_command: the job runs a COMMAND, which needs no Python environment.
        in_container: the job runs in an image, whose Python is no use outside.

    Raises:
        SchedulerError: the machine does not answer.
    """
    has_environment = profile.environment.kind in ("venv", "conda") or profile.environment.python is not None
    if profile.scheduler == "local" or (has_environment and not in_container) or not (is_command or in_container):
        return ""
    if hands.run(["sh", "-c", LOOK], timeout_s=_TIMEOUT_S).exit_status == 0:
        return ""
    return (
        f"{hands.host} has no python3 of version 3.6 or later, which starts the ranks; if the nodes have none: {_MEND}"
    )

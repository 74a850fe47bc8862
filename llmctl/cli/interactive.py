"""``llmctl interactive``: a shell, or one command, in the environment of jobs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmctl.cli.completion import complete_cluster, complete_run
from llmctl.context import Context, say
from llmctl.errors import UsageError

if TYPE_CHECKING:
    from llmctl.operate.interactive import Session
    from llmctl.site.profile import ClusterProfile

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_Text = str | None
_JOB_FLAGS = {
    "nodes": "--nodes",
    "gpus_per_node": "--gpus-per-node",
    "time": "--time",
    "group": "--group",
    "resource_type": "--resource-type",
    "queue": "--queue",
    "reservation": "--reservation",
    "container": "--container",
}
"""Key of the config's job section, also the name of the parameter -> flag."""


@app.command(epilog="llmctl interactive [OPTIONS] -- COMMAND [ARGS] runs COMMAND and exits with its exit code.")
def interactive(
    ctx: typer.Context,
    cluster: Annotated[
        _Text, typer.Option(metavar="NAME", help="Cluster. Default: as for submit.", autocompletion=complete_cluster)
    ] = None,
    nodes: Annotated[int | None, typer.Option(metavar="N", min=1, help="Number of nodes.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", metavar="N", min=1, help="GPUs per node.")
    ] = None,
    resource_type: Annotated[_Text, typer.Option("--resource-type", metavar="TYPE", help="Kind of node.")] = None,
    time: Annotated[_Text, typer.Option(metavar="H:M:S", help="Time limit; 90m too.")] = None,
    group: Annotated[_Text, typer.Option(metavar="GROUP", help="Group, project or account to bill.")] = None,
    queue: Annotated[_Text, typer.Option(metavar="QUEUE", help="Queue or partition.")] = None,
    reservation: Annotated[_Text, typer.Option(metavar="ID", help="Reservation of nodes.")] = None,
    container: Annotated[_Text, typer.Option(metavar="IMAGE", help="Container image.")] = None,
    run: Annotated[
        _Text, typer.Option(metavar="RUN", help="Attach to this run, on one of its nodes.", autocompletion=complete_run)
    ] = None,
    rank: Annotated[int | None, typer.Option(metavar="N", min=0, help="Attach on the node of this rank.")] = None,
) -> int:
    """Open a shell on a node, with a job's modules, Python, variables and code.

    With --run, the shell opens on a node of that run, with the run's code, LLMCTL_RUN_ID, LLMCTL_RUN_DIR and
    LLMCTL_ATTEMPT. With --rank, it also has LLMCTL_RANK and the rank's process id LLMCTL_RANK_PID, for a debugger.
    """
    given = {key: value for key, value in locals().items() if key in _JOB_FLAGS and value is not None}
    context: Context = ctx.obj
    if run is not None:
        return _attach(context, run, rank, cluster, given)
    if rank is not None:
        raise UsageError("--rank: names a rank of a run; give --run RUN too")
    from llmctl.operate.interactive import new_session
    from llmctl.submit.job import Flag

    profile = context.profile(*context.cluster(cluster))
    _check_offered(profile, given)
    flags = [Flag(_JOB_FLAGS[key], f"job.{key}", value) for key, value in given.items()]
    return _enter(new_session(context, profile, flags))


def _attach(context: Context, run: str, rank: int | None, cluster: str | None, given: Mapping[str, Any]) -> int:
    from llmctl.context import ClusterSession
    from llmctl.operate.attach import attach_to_run
    from llmctl.operate.interactive import attach_session
    from llmctl.runs.record import RunRecord

    entry = context.index.find(run)
    if cluster not in (None, entry.cluster):
        raise UsageError(f"--cluster {cluster}: {entry.run_id} is on {entry.cluster}; leave --cluster out")
    if given:
        flag = _JOB_FLAGS[next(iter(given))]
        raise UsageError(f"{flag}: {entry.run_id} already has its nodes; leave {flag} out")
    session = ClusterSession.of(context, entry.cluster, f"run {entry.run_id}")
    attachment = attach_to_run(RunRecord.load_own(entry.run_dir, session.transport), session, rank)
    if attachment.warning:
        say(attachment.warning)
    return _enter(attach_session(context, session.profile, attachment))


def _enter(session: "Session") -> int:
    if session.warning:
        say(session.warning)
    return session.run()


def _check_offered(profile: "ClusterProfile", given: Mapping[str, Any]) -> None:
    """Refuse, on this machine, flags that only a scheduler can serve."""
    from llmctl.backends import capabilities_of

    if not capabilities_of(profile.scheduler).starts_in_place:
        return
    flag = next((_JOB_FLAGS[key] for key, value in given.items() if (key, value) != ("nodes", 1)), None)
    if flag is not None:
        raise UsageError(f"{flag}: {profile.name} has no scheduler; the shell runs on this machine; leave {flag} out")

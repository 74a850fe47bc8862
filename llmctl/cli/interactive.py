"""``llmctl interactive``: a shell, or one command, in the environment that jobs find."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmctl.cli.completion import complete_cluster, complete_run
from llmctl.cli.console import say
from llmctl.errors import ProfileError, UsageError
from llmctl.invocation import Invocation

if TYPE_CHECKING:
    from llmctl.interactive import RunVisit
    from llmctl.profile import ClusterProfile

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_Text = str | None


@app.command(epilog="llmctl interactive [OPTIONS] -- COMMAND... runs COMMAND and leaves with its exit code.")
def interactive(
    ctx: typer.Context,
    cluster: Annotated[_Text, typer.Option(metavar="NAME", help="Where.", autocompletion=complete_cluster)] = None,
    nodes: Annotated[int | None, typer.Option(metavar="N", min=1, help="Number of nodes.")] = None,
    resource_type: Annotated[_Text, typer.Option("--resource-type", metavar="T", help="Kind of node.")] = None,
    time: Annotated[_Text, typer.Option(metavar="H:M:S", help="Time limit.")] = None,
    container: Annotated[_Text, typer.Option(metavar="IMAGE", help="Container image.")] = None,
    run: Annotated[
        _Text, typer.Option(metavar="RUN", help="With this run's code and variables.", autocompletion=complete_run)
    ] = None,
    rank: Annotated[int | None, typer.Option(metavar="R", min=0, help="Where this rank of RUN is.")] = None,
) -> int:
    """Open a shell in a job's environment: modules, Python, variables, and the code that jobs run.

    With --run: LLMCTL_RUN_ID, LLMCTL_RUN_DIR and LLMCTL_ATTEMPT of that run, and its code; with --rank also LLMCTL_RANK
    and the rank's process id, LLMCTL_RANK_PID, for a debugger.
    """
    from llmctl.interactive import visit_run
    from llmctl.run_record import RunRecord

    invocation: Invocation = ctx.obj
    visit, name, origin = None, "", ""
    if run is not None:
        record = RunRecord.load(invocation.index.find(run).run_dir, invocation.transport)
        if cluster not in (None, record.cluster):
            raise UsageError(f"--cluster {cluster}: {record.run_id} is on {record.cluster}; leave --cluster out")
        visit, name, origin = visit_run(record, invocation.transport, rank), record.cluster, f"run {record.run_id}"
    elif rank is not None:
        raise UsageError("--rank: says which rank of a run; give --run RUN too")
    else:
        name, origin = invocation.cluster(cluster)
    profile = invocation.profile(name, origin)
    given = {"--nodes": nodes if nodes != 1 else None, "--time": time}
    _check_offered(profile, {**given, "--resource-type": resource_type, "--container": container})
    if visit is not None and visit.remark:
        say(visit.remark)
    return _enter(invocation, profile, visit)


def _check_offered(profile: "ClusterProfile", flags: Mapping[str, object]) -> None:
    """Refuse what only a scheduler can give."""
    flag = next((flag for flag, value in flags.items() if value is not None), None)
    if flag is not None:
        raise UsageError(f"{flag}: {profile.name} has no scheduler; the shell runs on this machine; leave {flag} out")


def _enter(invocation: Invocation, profile: "ClusterProfile", visit: "RunVisit | None") -> int:
    from llmctl.backends import load_backend
    from llmctl.backends.base import JobRequest
    from llmctl.gpus import visible_gpus
    from llmctl.interactive import code_variables
    from llmctl.render import interactive_script, job_python
    from llmctl.snapshot import store_own_code

    if visit is not None:
        variables = dict(visit.variables)
    else:
        try:
            variables = code_variables(store_own_code(Path(profile.runs_root))[1], invocation.environment)
        except OSError as error:
            raise ProfileError(f"{profile.name}: runs_root: {profile.runs_root} cannot be written: {error}") from None
    script = interactive_script(
        profile,
        invocation.folders,
        job_python(profile, invocation.folders, sys.executable),
        on_cpu=not visible_gpus(invocation) or (visit is not None and visit.is_on_cpu),
        run_id=visit.record.run_id if visit is not None else None,
        run_dir=visit.record.run_dir if visit is not None else None,
        env=tuple(variables.items()),
    )
    request = JobRequest(profile, job_name="interactive", run_dir="")
    argv = load_backend(profile.scheduler).interactive_argv(request, script, invocation.command)
    return invocation.transport.run_interactive(argv, cwd=str(invocation.cwd))

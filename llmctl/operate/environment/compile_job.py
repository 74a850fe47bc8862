"""A step that compiles, as a job of the cluster: submitted like any COMMAND, followed to its end."""

import sys

from llmctl.context import ClusterSession
from llmctl.errors import RecordError
from llmctl.operate.environment.plan import Site
from llmctl.operate.environment.steps import Step
from llmctl.operate.follow import follow_run
from llmctl.operate.follow_output import PlainOutput
from llmctl.runs.record import RunRecord
from llmctl.submit.execute import execute_plan
from llmctl.submit.job import Flag, SubmitArguments
from llmctl.submit.plan import notes_beforehand, plan_submission

# job.sh has loaded the modules. $1: the log; $2: the step.
_RUN = """\
set -o pipefail
mkdir -p -- "$(dirname -- "$1")" || exit 1
bash -c "$2" </dev/null 2>&1 | tee -- "$1"
"""
NAME = "env-build"
"""Name of the runs."""


def submit_step(step: Step, environment: str, site: Site) -> str:
    """Submit a step as a job on one node; returns the run id.

    Args:
        step: that compiles.
        environment: path of the environment that is made. The profile's own may not exist.
        site: the machine and its folders.

    Raises:
        UsageError, ProfileError: the job is not valid; names the flag or key.
        SchedulerError: the scheduler did not accept the job.
    """
    flags = (Flag("--name", "job.name", NAME), *site.flags)
    command = ("bash", "-c", _RUN, "bash", site.log(step), site.script(step.lines))
    arguments = SubmitArguments(
        config=None, cluster=site.profile.name, flags=flags, command=command, environment=environment
    )
    plan = plan_submission(site.context, arguments)
    for line in notes_beforehand(plan, site.context, has_page=False):
        site.context.tell(line)
    record = execute_plan(plan, site.context)
    jobs = ", ".join(job.job_id for job in record.submissions[-1].jobs)
    site.context.tell(f"{step.name}: job {jobs} on {record.cluster}: llmctl logs -f {record.run_id}")
    return record.run_id


def follow_job(site: Site, run_id: str) -> int | None:
    """Follow a step's job to its end; returns 0, the exit code of Ctrl-C, or None if there is no such run.

    Raises:
        FollowedRunFailed: the job did not complete.
    """
    session = ClusterSession.of(site.context, site.profile.name, f"run {run_id}")
    try:
        record = RunRecord.load(site.context.index.find(run_id).run_dir, session.transport)
    except RecordError:
        return None
    return follow_run(record, session.transport, backend=session.backend, output=PlainOutput(sys.stderr))

"""``llmctl env bench``: a short job that measures a cluster's hardware, and the keeping of its result."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmctl.context import ClusterSession, Context, is_remote
from llmctl.errors import RecordError
from llmctl.job_state import JobState
from llmctl.operate.environment.measured import keep_hardware, remember_run, remembered_run
from llmctl.operate.follow import follow_run
from llmctl.operate.follow_output import PlainOutput
from llmctl.runs.observe import observe_run
from llmctl.runs.record import RunRecord
from llmctl.submit.decide import job_python
from llmctl.submit.execute import execute_plan
from llmctl.submit.job import Flag, SubmitArguments, SubmitPlan
from llmctl.submit.plan import notes_beforehand, plan_submission
from llmctl.submit.preview.hardware import measured_hardware, parse_hardware
from llmctl.transport.file_reads import FileRead
from trainer.config.records.measured_hardware import HARDWARE, HardwareDocument

if TYPE_CHECKING:
    from llmctl.site.profile import ClusterProfile

# $0: the job's Python; $1: ranks of a node without GPUs. The folder of the trainer, not -m: PYTHONPATH may have another
# package of this name.
_PROGRAM = """\
ranks=$LLMCTL_GPUS_PER_NODE
((ranks)) || ranks=$1
exec "$0" -m torch.distributed.run --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$ranks" \\
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --rdzv-id "$LLMCTL_RUN_ID.$LLMCTL_ATTEMPT" \\
    --max-restarts 0 --log-dir "$LLMCTL_ATTEMPT_DIR/torchrun" "$LLMCTL_RUN_DIR/code/trainer" bench "${@:2}"
"""
_TIME = "0:15:00"
"""Time limit: the measurements take three minutes, the first import of torch from a busy parallel file system more."""
_NODES = 2
"""Default number of nodes: the fewest with messages between nodes."""
_LONGEST_NAME = 64
JOB_FLAGS = {
    "nodes": "--nodes",
    "gpus_per_node": "--gpus-per-node",
    "resource_type": "--resource-type",
    "queue": "--queue",
    "time": "--time",
    "group": "--group",
}
"""Key of the job, also the name of the command's parameter -> flag."""


@dataclass(frozen=True)
class Bench:
    """A measurement that is asked for.

    Attributes:
        context: of this call.
        cluster: name of the profile.
        origin: source of the name, for messages.
        given: values of the flags of the job, by key; None for a flag that is not given.
    """

    context: Context
    cluster: str
    origin: str
    given: Mapping[str, Any]

    @property
    def request(self) -> dict[str, Any]:
        """The values that were given: a repeated command with the same ones comes back to its run."""
        return {key: value for key, value in self.given.items() if value is not None}


def plan_bench(bench: Bench, *, dry_run: bool) -> SubmitPlan:
    """Plan the job.

    Raises:
        UsageError, ProfileError: the job is not valid; names the flag or key.
        SchedulerError: the machine does not answer.
    """
    context = bench.context
    profile = context.profile(bench.cluster, bench.origin)
    own = "python3" if is_remote(profile) else sys.executable
    python = job_python(profile, context.folders, own)
    ranks = str(bench.given.get("gpus_per_node") or 1)
    defaults = {"nodes": _default_nodes(bench, profile), "time": _TIME}
    flags = [Flag(JOB_FLAGS[key], f"job.{key}", value) for key, value in {**defaults, **bench.request}.items()]
    name = f"bench-{bench.cluster}"[:_LONGEST_NAME]
    arguments = SubmitArguments(
        config=None,
        cluster=bench.cluster,
        flags=(Flag("--name", "job.name", name), *flags),
        command=("bash", "-c", _PROGRAM, python, ranks, "--cluster", bench.cluster),
        dry_run=dry_run,
    )
    return plan_submission(context, arguments)


def _default_nodes(bench: Bench, profile: "ClusterProfile") -> int:
    capabilities = bench.context.backend(profile).capabilities
    kind = profile.resource_types.get(bench.given.get("resource_type") or profile.defaults.resource_type or "")
    # On this machine, nodes would only share its devices; a job gets only one part of a node.
    if capabilities.starts_in_place or (kind is not None and kind.fraction):
        return 1
    available = len(profile.hosts) if capabilities.starts_on_hosts else kind.max_nodes if kind is not None else None
    return min(_NODES, available or _NODES)


def known_result(bench: Bench) -> HardwareDocument | None:
    """The kept result of the same request; None without one."""
    kept = measured_hardware(bench.context.folders, bench.cluster)
    run_id = remembered_run(bench.context, bench.cluster, bench.request)
    return kept if kept is not None and kept["run_id"] == run_id else None


def measure_cluster(bench: Bench, *, again: bool) -> HardwareDocument | int:
    """Submit the job, or go on with that of the same request, and keep its result.

    Args:
        bench: the measurement.
        again: submit a new job.

    Returns:
        The document, or the exit code of Ctrl-C, after which the job goes on.

    Raises:
        FollowedRunFailed: the job did not complete; names the step and the cause.
        UsageError, ProfileError, SchedulerError: see ``plan_bench``; or the job was not accepted.
        RecordError: the result is missing or damaged, or cannot be kept.
    """
    session = ClusterSession.of(bench.context, bench.cluster, bench.origin)
    record = None if again else _earlier_run(bench, session)
    if record is None:
        record = _submit(bench)
    else:
        bench.context.tell(f"going on with {record.run_id}; --again starts a new run")
    code = follow_run(record, session.transport, backend=session.backend, output=PlainOutput(sys.stderr))
    if code:
        bench.context.tell("the same command comes back to the run, and keeps its result")
        return code
    document = _read_result(record, session)
    keep_hardware(bench.context, document)
    return document


def _submit(bench: Bench) -> RunRecord:
    context, plan = bench.context, plan_bench(bench, dry_run=False)
    for line in notes_beforehand(plan, context, has_page=False):
        context.tell(line)
    # Before the job: whoever is interrupted finds it again.
    remember_run(context, bench.cluster, plan.record.run_id, bench.request)
    record = execute_plan(plan, context)
    jobs = ", ".join(job.job_id for job in record.submissions[-1].jobs)
    context.tell(f"{record.run_id}: job {jobs} on {record.cluster}")
    return record


def _earlier_run(bench: Bench, session: ClusterSession) -> RunRecord | None:
    """The run of the same request, unless it is gone or has failed."""
    run_id = remembered_run(bench.context, bench.cluster, bench.request)
    if run_id is None:
        return None
    try:
        record = RunRecord.load(bench.context.index.find(run_id).run_dir, session.transport)
    except RecordError:
        return None
    view = observe_run(record, session.transport, session.watch())
    return None if view.state.is_finished and view.state is not JobState.COMPLETED else record


def _read_result(record: RunRecord, session: ClusterSession) -> HardwareDocument:
    path = f"{record.run_dir}/{HARDWARE}"
    (part,) = session.transport.read_parts([FileRead(path)])
    document = parse_hardware(path, part.data) if part is not None else None
    if document is None:
        why = "is missing" if part is None else "is of another version of llmctl"
        raise RecordError(f"{path}: {why}, although {record.run_id} completed; llmctl env bench --again measures again")
    # The name of the kept file is not to come from a folder that others may write to.
    return {**document, "cluster": record.cluster, "run_id": record.run_id}

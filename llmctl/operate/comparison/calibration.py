"""Calibrate the planner of a cluster by the user's runs there."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from llmctl.context import ClusterSession, Context
from llmctl.errors import RecordError, UsageError
from llmctl.operate.comparison.planned import Planned, plan_of
from llmctl.operate.survey import load_records
from llmctl.runs.record import RunRecord
from llmctl.runs.series.reading import MetricsSource, read_history
from llmctl.runs.series.steady import FIRST_ROWS, KEYS, LEAST_ROWS, SteadyStep, steady_step
from llmctl.submit.preview.calibration import CalibratedRun, Calibration, write_calibration
from llmctl.submit.preview.hardware import with_measured_speeds
from trainer.planning.estimate.calibration import Factors, MeasuredRun, calibrate
from trainer.planning.estimate.devices import Device
from trainer.planning.estimate.plan import plan_run

MOST_RUNS = 40
"""Newest runs that are read."""
_MOST_REASONS = 5


@dataclass(frozen=True)
class _Timed:
    record: RunRecord
    planned: Planned
    steady: SteadyStep

    @property
    def measured(self) -> MeasuredRun:
        """As the fit takes it."""
        planned = self.planned
        config, vocabulary = planned.plan.config, planned.plan.vocab_size
        return MeasuredRun(config, vocabulary, planned.nodes, planned.per_node, self.steady.seconds, self.steady.bytes)


def calibrate_cluster(context: Context, flag: str | None) -> Calibration:
    """Fit the planner to the user's runs on a cluster, and keep the result for the plans of that cluster.

    Args:
        context: this call of llmctl.
        flag: value of --cluster; None: as for submit.

    Raises:
        UsageError: no run there can be compared; says why.
        ProfileError: the cluster has no profile.
        SchedulerError: the cluster cannot be reached.
    """
    name, origin = context.cluster(flag)
    context.profile(name, origin)
    reasons: list[str] = []
    least = FIRST_ROWS + LEAST_ROWS
    runs = list(_timed_runs(context, name, reasons))
    if not runs:
        said = f"--calibrate: no run of yours on {name} can be compared with a plan; train one for {least} logged steps"
        raise UsageError("\n".join([said, *reasons[-_MOST_REASONS:]]))
    # The newest run decides on the device, if the cluster has several.
    sheet = runs[-1].planned.plan.device
    own = [run for run in runs if run.planned.plan.device.name == sheet.name]
    device, hardware = with_measured_speeds(context.folders, name, sheet)
    factors = calibrate([run.measured for run in own], device)
    compared = tuple(_compared(run, device, factors) for run in own)
    run_id = None if hardware is None else hardware["run_id"]
    found = Calibration(name, sheet.name, time.time(), factors, compared, run_id)
    write_calibration(context.folders, found)
    return found


def _timed_runs(context: Context, cluster: str, reasons: list[str]) -> Iterator[_Timed]:
    """The newest runs on a cluster that have a plan and a time, the oldest first.

    Args:
        context: this call of llmctl.
        cluster: name of the profile.
        reasons: gets a line for each run that is left out.
    """
    entries = [entry for entry in context.index.entries() if entry.cluster == cluster][-MOST_RUNS:]
    if not entries:
        return
    session = ClusterSession.of(context, cluster, "--cluster")
    for entry, record in zip(entries, load_records(entries, session), strict=True):
        found = str(record) if isinstance(record, RecordError) else _timed(context, session, record)
        if isinstance(found, str):
            reasons.append(f"{entry.name}: {found}")
        else:
            yield found


def _timed(context: Context, session: ClusterSession, record: RunRecord) -> _Timed | str:
    """A run with its plan and time, or the reason why it has none."""
    planned = plan_of(context, session, record)
    if planned is None:
        return "is a COMMAND, not a training"
    if isinstance(planned, str):
        return planned
    if planned.plan.config.changes_batch_size:
        return "changes its batch during training"
    machine = session.transport
    source = MetricsSource(f"{record.run_dir}/metrics.jsonl", machine.read_parts, is_here=not machine.is_remote)
    steady = steady_step(read_history(source, KEYS))
    if steady is None:
        return f"has fewer than {FIRST_ROWS + LEAST_ROWS} rows of training"
    return _Timed(record, planned, steady)


def _compared(run: _Timed, device: Device, factors: Factors) -> CalibratedRun:
    """A run with its predictions before and after."""
    plan, steady = run.planned.plan, run.steady
    size = (run.planned.nodes, run.planned.per_node)
    before, after = (plan_run(plan.config, plan.vocab_size, each, *size) for each in (device, factors.of(device)))
    times = (steady.seconds, before.step.total, after.step.total)
    record, layout = run.record, _layout(run.planned)
    return CalibratedRun(record.run_id, record.name, layout, *times, steady.bytes, after.worst.total)


def _layout(planned: Planned) -> str:
    parallel, training = planned.plan.config.parallel, planned.plan.config.training
    sizes = {
        "tp": parallel.tensor_model_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
        "cp": parallel.context_parallel_size,
        "ep": parallel.expert_model_parallel_size,
        "dp": planned.plan.config.data_parallel_size(planned.plan.world_size),
    }
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    words += [f"ZeRO-{parallel.zero_stage}"] if parallel.zero_stage else []
    return " ".join([f"{planned.nodes} x {planned.per_node}:", *words, f"mbs {training.micro_batch_size}"])

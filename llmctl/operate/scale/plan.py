"""Plans of all sizes of a scaling: checked together, nothing is written or started."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from llmctl.context import ClusterSession, Context
from llmctl.errors import ConfigFileError, LlmctlError, ProfileError, RecordError, UsageError
from llmctl.operate.scale.kept import Scaling, ScalingFiles, SizeRun
from llmctl.operate.scale.settings import BY, changed_values, compared_values
from llmctl.operate.scale.sizes import BATCH, Batches, batches_of, section
from llmctl.runs.record import new_run_id
from llmctl.submit.decide import build_request
from llmctl.submit.job import Flag, JobCost, SubmitArguments, SubmitPlan
from llmctl.submit.origins import Resolved
from llmctl.submit.plan import given_values, notes_beforehand, plan_submission
from llmctl.submit.resolve import job_section, job_spec

_SAVE = "checkpoint.save"


@dataclass(frozen=True)
class SizePlan:
    """The submission of one size.

    Attributes:
        plan: of the submission.
        run: kept by the scaling.
        why_unpredicted: the reason why there is no prediction; empty if there is one.
    """

    plan: SubmitPlan
    run: SizeRun
    why_unpredicted: str


@dataclass(frozen=True)
class Asked:
    """A scaling as it was asked for.

    Attributes:
        context: this call of llmctl.
        arguments: of the submissions, without those that differ from size to size.
        session: of the cluster.
        resolved: the config's values as given.
        scaling: with the runs that there are from an earlier call.
        sizes: numbers of nodes asked for, ascending.
    """

    context: Context
    arguments: SubmitArguments
    session: ClusterSession
    resolved: Resolved
    scaling: Scaling
    sizes: tuple[int, ...]

    @property
    def values(self) -> Mapping[str, Any]:
        """The config's values as given."""
        return self.resolved.values

    @property
    def runs_at_once(self) -> bool:
        """True for jobs of a queue; without one, sizes that run at the same time would slow each other down."""
        return self.session.backend is not None

    @cached_property
    def batches(self) -> Batches:
        """The global batches of all sizes, also of those that have run."""
        known = self.scaling.runs
        sizes = sorted({*self.sizes, *(run.nodes for run in known)})
        batch = (known[0].nodes, known[0].global_batch_size) if known else None
        return batches_of(self.values, self._ranks(sizes), is_weak=self.scaling.is_weak, known=batch)

    def _ranks(self, sizes: Sequence[int]) -> dict[int, int]:
        profile = self.session.profile
        backend = self.session.backend or self.context.backend(profile)
        visible = None
        if backend.capabilities.starts_in_place:
            from llmctl.submit.visible_gpus import visible_gpus

            visible = visible_gpus(self.context)
        on_cpu = section(self.values, "training").get("device") == "cpu"
        spec = job_spec(self.resolved, job_section(self.resolved), self.scaling.name)
        found = {}
        for nodes in sizes:
            of_size = replace(spec, nodes=nodes)
            request = build_request(of_size, profile, backend, name="", run_dir="", visible_gpus=visible, on_cpu=on_cpu)
            found[nodes] = nodes * request.ranks_per_node
        return found


def read_asked(
    context: Context, arguments: SubmitArguments, sizes: tuple[int, ...], *, steps: int, is_weak: bool
) -> tuple[Asked, list[str]]:
    """Read the config, and the runs of an earlier call of the same scaling; also returns warnings about the config.

    Raises:
        UsageError, ConfigFileError, ProfileError: the cluster, config or name is not valid, or an earlier scaling of
            this name was of other values.
        RecordError: the file of the earlier scaling cannot be read.
    """
    session, resolved, default_name, warnings = given_values(context, arguments)
    name = str(section(resolved.values, "job").get("name") or default_name)
    profile = session.profile
    files = ScalingFiles(context.folders.state)
    asked = compared_values(resolved.values)
    scaling = Scaling(name, profile.name, is_weak, steps, asked, profile.cost.unit)
    known = files.find(name)
    if known is not None and known.runs:
        _check_same(known, scaling, files)
        scaling = replace(scaling, runs=known.runs)
    return Asked(context, arguments, session, resolved, scaling, sizes), warnings


def _check_same(known: Scaling, now: Scaling, files: ScalingFiles) -> None:
    """Refuse to put runs of different trainings into one table."""
    changes = {
        "--cluster": (known.cluster, now.cluster),
        "--weak": (known.is_weak, now.is_weak),
        "--steps": (known.steps, now.steps),
    }
    keys = {**known.asked, **now.asked}
    changes |= {key: (known.asked.get(key), now.asked.get(key)) for key in keys}
    different = [f"{key} was {was}, is {is_now}" for key, (was, is_now) in changes.items() if was != is_now]
    if different:
        raise UsageError(
            f"scaling {now.name} has runs of another training ({'; '.join(different)}); give another --name, or "
            f"remove {files.path(now.name)} to begin anew"
        )


def plan_sizes(asked: Asked, sizes: Sequence[int]) -> list[SizePlan]:
    """The plans of sizes, all checked before any is submitted.

    Raises:
        UsageError, ConfigFileError, ProfileError, RecordError: all problems of all sizes.
        SchedulerError: the cluster cannot be reached.
    """
    batches = asked.batches
    plans: list[SizePlan] = []
    errors: list[tuple[int, LlmctlError]] = []
    for nodes in sizes:
        try:
            plans.append(_plan_size(asked, nodes, batches.of[nodes]))
        except (UsageError, ConfigFileError, ProfileError, RecordError) as error:
            errors.append((nodes, error))
    first = [UsageError(_with_origin(asked, batches.problem))] if batches.problem else []
    if first or errors:
        raise _joined([*first], errors, len(sizes))
    return plans


def _with_origin(asked: Asked, problem: str) -> str:
    origin = asked.resolved.origins.get(BATCH)
    return f"{origin.text if origin is not None else asked.resolved.source}: {problem}"


def _joined(first: list[UsageError], errors: Sequence[tuple[int, LlmctlError]], count: int) -> LlmctlError:
    """One error for all; a problem of several sizes is told once, with their numbers of nodes."""
    of_message: dict[str, list[int]] = {}
    for nodes, error in errors:
        for line in error.message.splitlines():
            of_message.setdefault(line.removeprefix("also: "), []).append(nodes)
    lines = [error.message for error in first]
    for message, sizes in of_message.items():
        where = "" if len(sizes) == count else f"--nodes {','.join(map(str, sizes))}: "
        # A layout that does not fit is blamed on --nodes, which the sizes name already.
        lines.append(where + (message.removeprefix("--nodes: ") if where else message))
    kind = type(first[0] if first else errors[0][1])
    return kind("\n".join([lines[0], *(f"also: {line}" for line in lines[1:])]))


def _plan_size(asked: Asked, nodes: int, batch: int) -> SizePlan:
    name = f"{asked.scaling.name}-{nodes}n"
    flags = _flags_of_size(asked, batch, _save_folder(asked, name))
    job = {**asked.arguments.job, "nodes": nodes, "name": name}
    plan = plan_submission(asked.context, replace(asked.arguments, job=job, flags=tuple(flags)))
    assert plan.job.config is not None
    cost = plan.job.cost
    predicted = _predicted(plan, asked.context, dry_run=asked.arguments.dry_run)
    run = SizeRun(
        run_id=plan.record.run_id,
        nodes=nodes,
        devices=plan.job.request.nodes * plan.job.request.ranks_per_node,
        global_batch_size=batch,
        tokens_per_step=batch * plan.job.config.tokens_per_sample,
        predicted_s=None if isinstance(predicted, str) else predicted,
        node_hours=None if cost is None else cost.node_hours,
        points=None if cost is None else cost.points,
    )
    return SizePlan(plan, run, predicted if isinstance(predicted, str) else "")


def _flags_of_size(asked: Asked, batch: int, save: str | None) -> Iterator[Flag]:
    """The values of a short run; a message about a flag has the flag's words alone, so that they name the key too."""
    for flag in changed_values(asked.values, batch, asked.scaling.steps):
        if flag.key == _SAVE:
            if section(asked.values, "checkpoint").get("save") is not None:
                yield Flag(f"{BY}: {_SAVE}", _SAVE, save)
        else:
            yield replace(flag, flag=f"{BY}: {flag.key}") if flag.flag == BY else flag


def _save_folder(asked: Asked, name: str) -> str | None:
    """A folder of the run's own beside the config's checkpoints, for hosts that do not share the run directory."""
    save = section(asked.values, "checkpoint").get("save")
    if asked.session.profile.shared or not isinstance(save, str):
        return None
    return f"{save.rstrip('/')}-scale/{new_run_id(name, time.strftime('%y%m%d-%H%M%S'))}"


def _predicted(plan: SubmitPlan, context: Context, *, dry_run: bool) -> float | str:
    """Predicted seconds of a step, or the reason why there is no prediction."""
    from llmctl.operate.submission import preview_of_job
    from llmctl.submit.preview.estimate import estimate_of
    from trainer.planning.estimate.devices import DEVICES

    preview = preview_of_job(plan, context, asks=not dry_run)
    facts = preview.facts
    assert facts is not None
    if facts["iteration_time_s"] is not None:
        return facts["iteration_time_s"]
    if plan.job.request.gpus_per_node:
        return dict(preview.rows)["estimate"]
    # A cluster's nodes without GPUs: their memory is unknown, and does not matter for the time.
    planned = estimate_of(plan.job, facts["vocabulary"], DEVICES["CPU"])
    return planned if isinstance(planned, str) else planned.step.total


def notes_of(asked: Asked, plans: Sequence[SizePlan]) -> list[str]:
    """Notes to be told before the jobs are submitted, each once, the cost of all jobs last."""
    notes = [asked.batches.note] if asked.batches.note else []
    for each in plans:
        unpredicted = [f"no prediction: {each.why_unpredicted}"] if each.why_unpredicted else []
        own = [*notes_beforehand(each.plan, asked.context, has_page=True), *unpredicted]
        notes += [note for note in own if note not in notes]
    return [*(note for note in notes if note not in _beside_the_point(plans)), *_cost(plans)]


def _beside_the_point(plans: Sequence[SizePlan]) -> set[str]:
    """Warnings about the use of the trained model, which a few steps do not make."""
    from llmctl.submit.checks.config import generated_data_warnings

    return {note for each in plans if each.plan.job.config for note in generated_data_warnings(each.plan.job.config)}


def _cost(plans: Sequence[SizePlan]) -> Iterator[str]:
    costs = [each.plan.job.cost for each in plans]
    known: list[JobCost] = [cost for cost in costs if cost is not None]
    if known:
        # The jobs differ in their nodes alone.
        whole = replace(known[0], nodes=sum(cost.nodes for cost in known))
        yield f"{len(known)} job{'s ask' if len(known) > 1 else ' asks'} for {whole}"

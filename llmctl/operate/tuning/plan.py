"""The job of a tuning: the layouts that the planner finds fastest, to be tried one after the other."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmctl.context import Context, is_remote
from llmctl.durations import clock
from llmctl.errors import ConfigFileError, UsageError
from llmctl.operate.scale.settings import changed_values
from llmctl.operate.submission import preview_of_job
from llmctl.submit.decide import job_python
from llmctl.submit.job import SubmitArguments, SubmitPlan
from llmctl.submit.plan import given_values, plan_submission
from llmctl.submit.preview.calibration import known_device
from llmctl.submit.preview.estimate import device_of
from trainer.config.errors import ConfigError
from trainer.config.train_config import TrainConfig
from trainer.planning.estimate.candidates import fixed_batch
from trainer.planning.estimate.devices import DEVICES, Device
from trainer.planning.estimate.plan import RunPlan, plan_run
from trainer.planning.estimate.search import search_layouts
from trainer.planning.schedule.placement import ScheduleError

FILE = "tuning.json"
"""File of the run directory with config and candidates."""
OWN = "as the config has it"
"""Name of the layout that the config had."""
_MARGIN_MINUTES = 10
"""Time of the job beside that of the trials: its start, and the first import of torch."""
BY = "llmctl tune"
"""Origin of values in messages."""
_ENDLESS = 1_000_000
"""Iterations of a trial, which is ended when it has enough."""
# $0: the job's Python; $1: ranks of a node. The folder of the trainer, not -m: PYTHONPATH may have another package.
_PROGRAM = 'exec "$0" "$LLMCTL_RUN_DIR/code/trainer" tune --tuning "$LLMCTL_RUN_DIR/' + FILE + '" --ranks-per-node "$1"'


@dataclass(frozen=True)
class TuneAsked:
    """A tuning as it was asked for.

    Attributes:
        arguments: as of a submission of the config.
        layouts: candidates at most.
        steps: of a trial of the first round.
        minutes: for all trials; None: by ``points``.
        points: that the job may cost; None: by ``minutes``.
    """

    arguments: SubmitArguments
    layouts: int
    steps: int
    minutes: float | None
    points: float | None


@dataclass(frozen=True)
class Tuning:
    """A tuning, planned.

    Attributes:
        plan: of its job.
        request: what an earlier run must have been asked for, to go on with it.
        candidates: the layouts, in the order of their predicted time, as the job's file has them.
        minutes: for the trials.
    """

    plan: SubmitPlan
    request: Mapping[str, Any]
    candidates: list[dict[str, Any]]
    minutes: float


def plan_tuning(context: Context, asked: TuneAsked) -> Tuning:
    """Check the training, search its layouts, and plan the job.

    Raises:
        UsageError, ConfigFileError, ProfileError: all problems of the training; or no layout fits.
        SchedulerError: the machine does not answer.
    """
    training, own = _training(context, asked)
    config = training.job.config
    assert config is not None
    candidates = _candidates(context, training, config, asked)
    minutes = _minutes(training, asked)
    request = {
        "config": json.loads(config.model_dump_json(exclude_unset=True)),
        "nodes": training.job.request.nodes,
        "ranks_per_node": training.job.request.ranks_per_node,
        "steps": asked.steps,
    }
    document = {**request, "candidates": candidates, "seconds": 60 * minutes, "own": own}
    plan = _job(context, asked, training, minutes)
    fixed = fixed_batch(config, training.job.request.nodes * training.job.request.ranks_per_node)
    notes = tuple(f"{key}: is unset; all layouts have {value}" for key, value in fixed.items())
    files = {FILE: json.dumps(document, indent=1).encode()}
    return Tuning(replace(plan, files=files, warnings=(*training.warnings, *notes)), request, candidates, minutes)


def _training(context: Context, asked: TuneAsked) -> tuple[SubmitPlan, Mapping[str, Any]]:
    """The submission of the training, checked as any other but never carried out; and the config's values as given."""
    _, resolved, default_name, _ = given_values(context, asked.arguments)
    flags = tuple(changed_values(resolved.values, None, _ENDLESS, BY))
    name = asked.arguments.job.get("name") or f"tune-{default_name}"
    job = {**asked.arguments.job, "name": name}
    plan = plan_submission(context, replace(asked.arguments, job=job, flags=flags))
    return plan, {name: section for name, section in resolved.values.items() if name != "job"}


def _candidates(context: Context, training: SubmitPlan, config: TrainConfig, asked: TuneAsked) -> list[dict[str, Any]]:
    """The fastest layouts, and that of the config, by their predicted time."""
    job = training.job
    nodes, ranks = job.request.nodes, job.request.ranks_per_node
    facts = preview_of_job(training, context, asks=not asked.arguments.dry_run).facts
    vocabulary = None if facts is None else facts["vocabulary"]
    if vocabulary is None:
        raise UsageError("model.vocab_size: is unset, and no data or tokenizer that can be read here says it; set it")
    device = _device(context, training)
    try:
        found = search_layouts(config, vocabulary, device, nodes, ranks).found
    except ConfigError as error:
        raise ConfigFileError(str(error)) from None
    layouts = [(str(each.candidate), each.candidate.values, each.plan) for each in found][: asked.layouts]
    own = _own_plan(config, vocabulary, device, nodes, ranks)
    if own is not None and not any(_is_same(own, plan) for _, _, plan in layouts):
        layouts.append((OWN, {}, own))
    if not layouts:
        raise UsageError(f"no layout fits on {nodes} x {ranks} {device.name}: llmctl plan --search says what it needs")
    layouts.sort(key=lambda each: each[2].step.total)
    return [
        {"name": name, "settings": values, "seconds": plan.step.total, "bytes": plan.worst.total}
        for name, values, plan in layouts
    ]


def _own_plan(config: TrainConfig, vocabulary: int, device: Device, nodes: int, ranks: int) -> RunPlan | None:
    """The plan of the config's own layout; None: it does not fit."""
    try:
        plan = plan_run(config, vocabulary, device, nodes, ranks)
    except (ConfigError, ScheduleError):
        return None
    return plan if plan.fits else None


def _is_same(one: RunPlan, other: RunPlan) -> bool:
    return all(getattr(one.config, section) == getattr(other.config, section) for section in ("parallel", "training"))


def _device(context: Context, training: SubmitPlan) -> Device:
    device = device_of(training.job, context.transport)
    if device is None and training.job.request.gpus_per_node:
        raise UsageError(
            f"--cluster {training.job.profile.name}: its profile names no known GPU (resource_types: gpu), so that no "
            f"layout can be ranked; the devices are {', '.join(DEVICES)}"
        )
    # The memory of a cluster's nodes without GPUs is unknown.
    return known_device(context.folders, training.job.profile.name, device or DEVICES["CPU"]).device


def _minutes(training: SubmitPlan, asked: TuneAsked) -> float:
    """Minutes for the trials."""
    if asked.points is None:
        assert asked.minutes is not None
        return asked.minutes
    cost = training.job.cost
    if cost is None or cost.rate is None:
        raise UsageError(f"--points: {training.job.profile.name} names no rate for this kind of node; use --minutes")
    minutes = 60 * asked.points / (cost.rate * cost.nodes) - _MARGIN_MINUTES
    if minutes < 1:
        least = (_MARGIN_MINUTES + 1) / 60 * cost.rate * cost.nodes
        raise UsageError(f"--points {asked.points:g}: does not pay for the start of the job; give {least:.3g} or more")
    return minutes


def _job(context: Context, asked: TuneAsked, training: SubmitPlan, minutes: float) -> SubmitPlan:
    """The job of the trials, with the nodes, variables and mounts of the training."""
    given, profile = asked.arguments, training.job.profile
    python = job_python(profile, context.folders, "python3" if is_remote(profile) else sys.executable)
    job = {**given.job, "name": training.record.name}
    if job.get("time") is None:
        job["time"] = clock(60 * (minutes + _MARGIN_MINUTES))
    flags = tuple(flag for flag in changed_values({}, None, _ENDLESS, BY) if flag.key.startswith("job."))
    settings = given.settings
    if not isinstance(settings, Mapping):
        settings = tuple(each for each in settings if each.startswith("job."))
    command = ("bash", "-c", _PROGRAM, python, str(training.job.request.ranks_per_node))
    return plan_submission(context, replace(given, job=job, flags=flags, settings=settings, command=command))

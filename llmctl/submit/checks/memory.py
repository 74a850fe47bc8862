"""Checks of a training run against the devices of its nodes, by the estimate of ``llmctl plan``."""

from collections.abc import Iterator

from llmctl.submit.checks.config import config_problems
from llmctl.submit.checks.site import size_problems
from llmctl.submit.job import Job, Problem
from trainer.config.errors import ConfigError
from trainer.planning.estimate.devices import GIB, find_device
from trainer.planning.estimate.plan import RunPlan, plan_run
from trainer.planning.schedule.placement import ScheduleError


def memory_warnings(job: Job) -> list[str]:
    """Warnings about a training run that may not fit into its devices, is tight, or is slower than need be."""
    plan = _memory_plan(job)
    if plan is None:
        return []
    too_large = [] if plan.fits else [f"may not fit: {plan.why_not}; llmctl plan suggests a change"]
    return too_large + plan.remarks


def memory_problems(job: Job) -> Iterator[Problem]:
    """Refusal of a run whose weights, gradients and optimizer state alone exceed the device."""
    # Only a job of a valid size and layout can be estimated.
    if any(size_problems(job)) or any(config_problems(job)):
        return
    plan = _memory_plan(job)
    if plan is None or not plan.cannot_fit:
        return
    states = max(rank.states for rank in plan.ranks) / GIB
    yield Problem(
        "parallel",
        f"cannot fit: weights, gradients and optimizer state take {states:.1f} GiB of a rank, but {plan.device.name} "
        f"has {plan.device.memory / GIB:.1f}; use more tensor or pipeline parallelism, or see llmctl plan for a change",
        also=("job.nodes", "job.resource_type"),
    )


def _memory_plan(job: Job) -> RunPlan | None:
    """The plan of a job's run; None if the profile names no known GPU, or the estimate does not cover the model."""
    config, resource = job.config, job.request.resource
    if config is None or config.model.vocab_size is None or resource is None or resource.gpu is None:
        return None
    device = find_device(resource.gpu, resource.gpu_memory_gib)
    # A device of another size under the same name: the estimate would compare with the wrong memory.
    if resource.fraction or device is None or not _is_size(device.memory, resource.gpu_memory_gib):
        return None
    try:
        return plan_run(config, config.model.vocab_size, device, job.spec.nodes, job.request.ranks_per_node)
    except (ConfigError, ScheduleError):
        return None


def _is_size(memory: int, named_gib: float | None) -> bool:
    return named_gib is None or abs(memory / GIB / named_gib - 1) < 0.1

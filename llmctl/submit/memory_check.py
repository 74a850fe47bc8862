"""Check of a training run's memory against the devices of its nodes, by the estimate of ``llmctl plan``."""

from collections.abc import Iterator

from llmctl.submit.origins import Problem
from llmctl.submit.request import AskedJob
from trainer.config.errors import ConfigError
from trainer.config.train_config import TrainConfig
from trainer.planning.estimate.devices import GIB, find_device
from trainer.planning.estimate.plan import RunPlan, plan_run
from trainer.planning.schedule.placement import ScheduleError


def memory_plan(job: AskedJob, config: TrainConfig) -> RunPlan | None:
    """The plan of a job's run; None if the profile names no known GPU, or the estimate does not cover the model."""
    resource = job.request.resource
    if resource is None or resource.gpu is None or resource.fraction or config.model.vocab_size is None:
        return None
    device = find_device(resource.gpu, resource.gpu_memory_gib)
    # A device of another size under the same name: the estimate would compare with the wrong memory.
    if device is None or not _is_size(device.memory, resource.gpu_memory_gib):
        return None
    try:
        return plan_run(config, config.model.vocab_size, device, job.spec.nodes, job.request.ranks_per_node)
    except (ConfigError, ScheduleError):
        return None


def memory_problems(job: AskedJob, config: TrainConfig) -> Iterator[Problem]:
    """Refusal of a run whose weights, gradients and optimizer state alone exceed the device."""
    plan = memory_plan(job, config)
    if plan is None or not plan.cannot_fit:
        return
    states = max(rank.states for rank in plan.ranks) / GIB
    yield Problem(
        "parallel",
        f"cannot fit: weights, gradients and optimizer state take {states:.1f} GiB of a rank, but {plan.device.name} "
        f"has {plan.device.memory / GIB:.1f}; use more tensor or pipeline parallelism, or see llmctl plan for a change",
        also=("job.nodes", "job.resource_type"),
    )


def _is_size(memory: int, named_gib: float | None) -> bool:
    return named_gib is None or abs(memory / GIB / named_gib - 1) < 0.1

"""What must hold before anything is written, queued or started: one function per concern, each naming the culprit."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmctl.backends import load_backend
from llmctl.errors import ConfigFileError, LlmctlError, RecordError
from llmctl.runs.record import RunRecord
from llmctl.site.job import JobError, JobSpec, parse_time
from llmctl.site.profile import ClusterProfile
from llmctl.submit.path_checks import PathCheck
from llmctl.submit.resolve import Resolved, unknown_job_key
from llmctl.transport.file_writes import PathFacts
from trainer.config.errors import ConfigError
from trainer.config.sections import JobConfig
from trainer.config.train_config import TrainConfig
from trainer.planning.build_config import build_config
from trainer.planning.checks import check_world_size

if TYPE_CHECKING:
    from pydantic import ValidationError

MOST_LOCAL_NODES = 1024
"""Far above what trains on one machine, far below what exhausts its process table by a slip of the pen."""


def check_config(resolved: Resolved) -> TrainConfig:
    """The training config, valid in itself.

    Raises:
        UsageError, ConfigFileError: names the key, and the flag or file that it came from.
    """
    try:
        return build_config(resolved.values)
    except ConfigError as error:
        raise resolved.refusal(error.key, error.problem) from None


def check_job_section(resolved: Resolved) -> JobConfig:
    """The job section alone, for a COMMAND.

    Raises:
        UsageError, ConfigFileError: names the key, and the flag or file that it came from.
    """
    from pydantic import ValidationError

    try:
        return JobConfig.model_validate(resolved.values.get("job", {}))
    except ValidationError as error:
        raise _job_refusal(resolved, error) from None


def check_job(resolved: Resolved, section: JobConfig, default_name: str, **more: Any) -> JobSpec:
    """The job that a ``job`` section asks for.

    Args:
        resolved: names the culprit.
        section: the values.
        default_name: the run's name where the section gives none.
        more: what stands in no config: ``after`` and ``command``.

    Raises:
        UsageError, ConfigFileError: names the key, and the flag or file that it came from.
    """
    values = section.model_dump(exclude={"name", "time"})
    try:
        time_s = parse_time(section.time) if section.time is not None else None
        return JobSpec.from_plain({**values, "name": section.name or default_name, "time_s": time_s, **more})
    except JobError as error:
        raise resolved.refusal(f"job.{error.key}", error.problem) from None


def check_offered(resolved: Resolved, job: JobSpec, profile: ClusterProfile) -> None:
    """Refuse what the scheduler has no word for, instead of leaving it out in silence.

    Raises:
        UsageError, ConfigFileError: names the key, and the flag or file that it came from.
    """
    backend = load_backend(profile.scheduler)
    section = {**job.as_plain(), "time": job.time_s}
    for key in ("resource_type", "queue", "reservation", "priority", "after", "container", "mounts", "launcher"):
        if not section[key] or key in backend.job_keys:
            continue
        value = section[key]
        shown = ", ".join(value) if isinstance(value, tuple) else value
        raise resolved.refusal(
            f"job.{key}", f"{shown!r} means nothing on {profile.name}, which has no {_plural(key)}; leave it out"
        )


def place_on_this_machine(
    resolved: Resolved, job: JobSpec, gpu_ids: Sequence[str], *, on_cpu: bool
) -> tuple[tuple[str, ...], ...]:
    """The GPUs of each node of a job on this machine; empty without GPUs, where every node has one rank.

    Args:
        resolved: names the culprit.
        job: gives nodes and GPUs per node.
        gpu_ids: GPUs of this machine.
        on_cpu: whether the job asks for none of them.

    Raises:
        UsageError, ConfigFileError: there are not enough; says how many there are and what fits.
    """
    wanted = job.gpus_per_node
    keys = ("job.nodes", "job.gpus_per_node")
    if job.nodes > MOST_LOCAL_NODES:
        raise resolved.refusal(
            keys[0], f"{job.nodes} is above {MOST_LOCAL_NODES}: every node is a group of processes on this machine"
        )
    if on_cpu or not gpu_ids:
        if wanted is not None and wanted > 1:
            why = "training.device is cpu" if on_cpu and gpu_ids else "this machine has no GPU"
            raise resolved.refusal(
                "job.gpus_per_node", f"{wanted} is above 1, and {why}: every node has one rank; raise nodes instead"
            )
        return ()
    per_node = wanted or max(1, len(gpu_ids) // job.nodes)
    if job.nodes * per_node > len(gpu_ids):
        key = keys[1] if wanted is not None and resolved.origin(keys[0]) is None else keys[0]
        raise resolved.refusal(
            key,
            f"{job.nodes} nodes x {per_node} GPUs = {job.nodes * per_node}, but this machine has {len(gpu_ids)}; "
            "lower one, or train without GPUs by training.device=cpu",
            also=keys,
        )
    return tuple(tuple(gpu_ids[node * per_node : (node + 1) * per_node]) for node in range(job.nodes))


def check_layout(resolved: Resolved, config: TrainConfig, nodes: int, ranks_per_node: int) -> None:
    """Refuse a layout or batch size that does not fit the job.

    Raises:
        UsageError, ConfigFileError: names the numbers and the nearest that fit.
    """
    try:
        check_world_size(config, nodes * ranks_per_node)
    except ConfigError as error:
        size = f" (world size = {_count(nodes, 'node')} x {_count(ranks_per_node, 'rank')}; --nodes changes it)"
        raise resolved.refusal(
            error.key, error.problem + size, also=(error.key, "job.nodes", "job.gpus_per_node")
        ) from None


def snapshot_check(record: RunRecord) -> PathCheck:
    """A run goes on with the code that it began with: its snapshot of the trainer is still there."""
    code = f"{record.run_dir}/code/trainer"

    def judge(facts: PathFacts) -> LlmctlError | None:
        if record.code.get("trainer") is None or facts.kind == "folder":
            return None
        remedy = "submit its command anew"
        if record.config is not None:
            remedy = f"llmctl submit {record.run_dir}/config.yaml --set checkpoint.load={record.run_dir}/checkpoints"
        return RecordError(f"{code}: the snapshot of the trainer that the run began with is gone\n{remedy}")

    return PathCheck(code, judge)


def _job_refusal(resolved: Resolved, error: "ValidationError") -> LlmctlError:
    problems = sorted(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return resolved.refusal(f"job.{key}", unknown_job_key(key))
    if not key:
        return ConfigFileError(f"{resolved.source}: job: is not a mapping")
    return resolved.refusal(
        f"job.{key}", f"{first['input']!r} is not valid: {first['msg'][:1].lower()}{first['msg'][1:]}"
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _plural(key: str) -> str:
    return {
        "resource_type": "resource types",
        "queue": "queues",
        "reservation": "reservations",
        "priority": "priorities",
        "after": "waiting jobs",
        "container": "containers",
        "mounts": "containers",
    }.get(key, f"{key}s")

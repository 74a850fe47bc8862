"""What must hold before anything is written, queued or started: one function per concern, each naming the culprit."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.backends import load_backend
from llmctl.errors import ConfigFileError, LlmctlError, ProfileError, RecordError, UsageError
from llmctl.invocation import Invocation
from llmctl.job import JobError, JobSpec, parse_time
from llmctl.profile import ClusterProfile
from llmctl.profile_names import profile_files
from llmctl.render import environment_script, job_python
from llmctl.resolve import Resolved, unknown_job_key
from llmctl.run_record import RunRecord
from trainer.config import ConfigError, JobConfig, TrainConfig, build_config

if TYPE_CHECKING:
    from pydantic import ValidationError

MOST_LOCAL_NODES = 1024
"""Far above what trains on one machine, far below what exhausts its process table by a slip of the pen."""
_PROBE_TIMEOUT_S = 60
_PIP = "pip install 'llmctl[train]'"


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


def check_launcher(resolved: Resolved, job: JobSpec, profile: ClusterProfile) -> None:
    """Refuse a launcher that the scheduler cannot start the ranks with.

    Raises:
        UsageError, ConfigFileError: names the flag or file that it came from.
    """
    launchers = load_backend(profile.scheduler).launchers
    if job.launcher is not None and job.launcher not in launchers:
        raise resolved.refusal(
            "job.launcher", f"{job.launcher} cannot start ranks on {profile.name}; use {' or '.join(launchers)}"
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
        config.check_world_size(nodes * ranks_per_node)
    except ConfigError as error:
        size = f" (world size = {_count(nodes, 'node')} x {_count(ranks_per_node, 'rank')}; --nodes changes it)"
        raise resolved.refusal(
            error.key, error.problem + size, also=(error.key, "job.nodes", "job.gpus_per_node")
        ) from None


def check_places(resolved: Resolved, config: TrainConfig) -> None:
    """Refuse data, a tokenizer or a checkpoint that is not there, and folders that cannot be written.

    Raises:
        UsageError, ConfigFileError: names the key, the place looked at and the remedy.
    """
    data = config.data
    if not (data.data_path or data.train_data_path or data.mock_data):
        raise resolved.refusal(
            "data.data_path",
            "is unset: give the prefix of a .bin/.idx pair, which `python -m trainer preprocess` makes from text, "
            "or set data.mock_data=true",
        )
    for key in ("data_path", "train_data_path", "valid_data_path"):
        for prefix in getattr(data, key):
            missing = next((end for end in (".bin", ".idx") if not Path(f"{prefix}{end}").is_file()), None)
            if missing is not None:
                raise resolved.refusal(
                    f"data.{key}",
                    f"there is no {prefix}{missing}; name the prefix of a .bin/.idx pair, which "
                    "`python -m trainer preprocess` makes from text",
                )
    for key, place in (("data.tokenizer_model", data.tokenizer_model), ("checkpoint.load", config.checkpoint.load)):
        if place is not None and not Path(place).exists():
            raise resolved.refusal(key, f"there is no {place}; name one that is there, or leave it out")
    for key, place in (("checkpoint.save", config.checkpoint.save), ("data.data_cache_path", data.data_cache_path)):
        problem = _why_unwritable(Path(place)) if place is not None else ""
        if problem:
            raise resolved.refusal(key, f"{place} cannot be written: {problem}; name another, or leave it out")


def check_runs_root(profile: ClusterProfile, invocation: Invocation) -> None:
    """Refuse a folder for the runs that cannot be made or written.

    Raises:
        ProfileError: names the folder, what is wrong with it, and where it is set.
    """
    wrong = next((letter for letter in profile.runs_root if letter == ":" or ord(letter) < 32), None)
    if wrong is not None:
        raise runs_root_error(profile, invocation, f"PYTHONPATH and hostfiles cannot carry {wrong!r}; name another")
    problem = _why_unwritable(Path(profile.runs_root))
    if problem:
        raise runs_root_error(profile, invocation, problem)


def _why_unwritable(folder: Path) -> str:
    """Why a folder, to be made with its parents where it is not there, cannot be written; empty if it can."""
    there = next(place for place in (folder, *folder.parents) if place.exists() or place.is_symlink())
    if not there.is_dir():
        return f"{there} is not a folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} is not writable for you"
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        return f"{there} is on a file system mounted read-only"
    if there != folder and str(there).startswith(("/proc", "/sys")):
        return f"{there} is the kernel's and holds no files of yours"
    return ""


def runs_root_error(profile: ClusterProfile, invocation: Invocation, problem: str) -> ProfileError:
    """The refusal of runs_root, naming where its value came from and where to set another."""
    if invocation.environment.get("LLMCTL_RUNS_ROOT"):
        where = "LLMCTL_RUNS_ROOT"
    else:
        where = f"{profile_files(invocation.folders, profile.name)[-1]}: runs_root"
    remedy = f"set LLMCTL_RUNS_ROOT, or runs_root in {invocation.folders.clusters / profile.name}.yaml"
    return ProfileError(f"{where}: {profile.runs_root} cannot hold the runs: {problem}\n{remedy}")


def check_torch(profile: ClusterProfile, invocation: Invocation) -> None:
    """Refuse to train with a Python that has no torch. Asks without importing it.

    Raises:
        ProfileError: there is none, or no such Python; gives the command that installs it.
        SchedulerError: the Python does not answer.
    """
    python = job_python(profile, invocation.folders, sys.executable)
    software = profile.environment
    if python == sys.executable and not (software.modules or software.setup or software.kind):
        from importlib.util import find_spec

        if find_spec("torch") is None:
            raise ProfileError(f"{python} has no torch, which the trainer needs; install it:\n{python} -m {_PIP}")
        return
    probe = "import importlib.util, sys; sys.exit(3 if importlib.util.find_spec('torch') is None else 0)"
    script = environment_script(profile, invocation.folders)
    answer = invocation.transport.run(["bash", "-c", script, "bash", python, "-c", probe], timeout_s=_PROBE_TIMEOUT_S)
    if answer.exit_status == 3:
        raise ProfileError(f"{python} has no torch, which the trainer needs; install it:\n{python} -m {_PIP}")
    if answer.exit_status != 0:
        file = profile_files(invocation.folders, profile.name)[-1]
        said = " ".join(answer.stderr.split())[-300:] or f"exit status {answer.exit_status}"
        raise ProfileError(f"{file}: environment: {python} does not start: {said}\nllmctl clusters validate checks it")


def check_new_run(run_dir: Path, run_id: str) -> None:
    """Refuse a --run-id that is taken.

    Raises:
        UsageError: its run directory is there.
    """
    if run_dir.exists():
        raise UsageError(f"--run-id {run_id}: {run_dir} is there already; a run id is used once, leave the flag out")


def check_snapshot(record: RunRecord) -> None:
    """Refuse to go on with other code than a run began with.

    Raises:
        RecordError: the snapshot of the trainer is gone; says how the work is saved.
    """
    code = record.run_dir / "code" / "trainer"
    if record.code.get("trainer") is not None and not code.is_dir():
        remedy = "submit its command anew"
        if record.config is not None:
            remedy = f"llmctl submit {record.run_dir}/config.yaml --set checkpoint.load={record.run_dir}/checkpoints"
        raise RecordError(f"{code}: the snapshot of the trainer that the run began with is gone\n{remedy}")


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

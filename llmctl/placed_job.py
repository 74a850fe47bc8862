"""A job with everything decided: its size, the request to the scheduler, where it runs, its script. Starts nothing."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from llmctl.backends.base import JobRequest
from llmctl.container import is_file
from llmctl.container_checks import check_own_mounts, on_host
from llmctl.errors import ProfileError
from llmctl.gpus import visible_gpus
from llmctl.invocation import Invocation, is_remote
from llmctl.job import JobSpec
from llmctl.job_request import build_request, size_of_node
from llmctl.profile import ClusterProfile
from llmctl.render import RenderedJob, RunPlace, cache_folder, job_python, render
from llmctl.resolve import Resolved
from llmctl.secrets import secrets_file
from llmctl.submit_checks import check_layout, place_on_this_machine
from trainer.config import TrainConfig


@dataclass(frozen=True)
class PlacedJob:
    """One submission, ready to be carried out.

    Attributes:
        rendered: script and commands.
        request: what the scheduler is asked for.
        place: where it runs.
        folders: to be made before, because a container can mount only what is there.
    """

    rendered: RenderedJob
    request: JobRequest
    place: RunPlace
    folders: tuple[str, ...]


def place_job(
    invocation: Invocation,
    resolved: Resolved,
    job: JobSpec,
    config: TrainConfig | None,
    profile: ClusterProfile,
    run_dir: Path,
    *,
    submission: int,
    after_ids: Sequence[str] = (),
    after_any: bool = False,
    cwd: str | None = None,
    template: Mapping[str, str] | None = None,
) -> PlacedJob:
    """Decide and render.

    Args:
        invocation: of this call.
        resolved: names the culprit.
        job: what is asked for.
        config: of a training run; None for a COMMAND.
        profile: of the cluster, settled.
        run_dir: of the run.
        submission: its number.
        after_ids: jobs to wait for.
        after_any: however they end.
        template: the user's, for job.sh; None: the scheduler's own.
        cwd: where a COMMAND starts; None: where this call was typed, or on another machine the run directory.

    Raises:
        UsageError, ConfigFileError: the size is not offered, or does not fit the layout.
        ProfileError: another machine's Python is not named.
    """
    on_cpu = config is not None and config.training.device == "cpu"
    gpus, ranks, asked = _size(invocation, resolved, job, profile, on_cpu=on_cpu)
    if config is not None:
        check_layout(resolved, config, job.nodes, ranks)
    secrets = secrets_file(invocation, profile, run_dir, submission) if job.secrets else None
    working_dir = _working_dir(invocation, job, profile, run_dir, cwd)
    written = (*_outside(_written(config), job, profile), cache_folder(str(run_dir.parent)))
    mounts = [str(run_dir), f"{run_dir.parent}/.code", *written, *_outside(_read(config), job, profile)]
    mounts += [str(working_dir)] if job.command and working_dir != run_dir else []
    mounts += [str(PurePosixPath(secrets).parent)] if secrets is not None else []
    request = build_request(
        job,
        profile,
        run_id=run_dir.name,
        run_dir=str(run_dir),
        after_ids=after_ids,
        after_any=after_any,
        ranks_per_node=ranks,
        gpus_per_node=asked,
        own_mounts=tuple(dict.fromkeys(mounts)),
        cwd=str(invocation.cwd),
    )
    if request.container is not None:
        check_own_mounts(mounts, request.container.runtime)
    place = RunPlace(
        run_id=run_dir.name,
        run_dir=run_dir,
        submission=submission,
        python=_python(invocation, job, profile, in_container=request.container is not None),
        gpus=gpus,
        ranks_per_node=ranks,
        working_dir=working_dir,
        secrets_file=Path(secrets) if secrets is not None else None,
    )
    rendered = render(job, profile, place, invocation.folders, request, template=template)
    return PlacedJob(rendered, request, place, written if request.container is not None else ())


def _size(
    invocation: Invocation, resolved: Resolved, job: JobSpec, profile: ClusterProfile, *, on_cpu: bool
) -> tuple[tuple[tuple[str, ...], ...], int, int]:
    """Each node's GPUs where this machine is the cluster, and per node the ranks and the GPUs that are asked for."""
    if profile.scheduler != "local":
        return (), *size_of_node(resolved, job, profile, on_cpu)
    gpus = place_on_this_machine(resolved, job, visible_gpus(invocation), on_cpu=on_cpu)
    return gpus, len(gpus[0]) if gpus else 1, len(gpus[0]) if gpus else 0


def image_file(invocation: Invocation, job: JobSpec, profile: ClusterProfile) -> str | None:
    """The file of the job's image, if it is one. A relative one counts from here, where the machine is this one."""
    software = profile.environment
    image = job.container or (software.path if software.kind == "container" else None)
    if image is None or not is_file(image):
        return None
    return image if is_remote(profile) else str(invocation.cwd / image)


def _python(invocation: Invocation, job: JobSpec, profile: ClusterProfile, *, in_container: bool) -> str:
    # Our own interpreter means nothing on another machine; a COMMAND needs one only to find where to meet.
    own = sys.executable if not is_remote(profile) else "python3" if job.command else ""
    python = job_python(profile, invocation.folders, own, in_container=in_container)
    if python:
        return python
    raise ProfileError(
        f"cluster {profile.name}: environment is unset, and which Python of {profile.login.host or profile.hosts[0]} "
        f"runs the job cannot be guessed\nset environment: {{kind: venv, path: ...}} in "
        f"{invocation.folders.clusters / profile.name}.yaml; llmctl clusters setup {profile.name} asks for it"
    )


def _working_dir(invocation: Invocation, job: JobSpec, profile: ClusterProfile, run_dir: Path, cwd: str | None) -> Path:
    if job.code:
        return run_dir / "code" / "user"
    if is_remote(profile):
        return run_dir
    return Path(cwd) if cwd is not None else invocation.cwd


def _written(config: TrainConfig | None) -> list[str]:
    if config is None:
        return []
    return [path for path in (config.checkpoint.save, config.data.data_cache_path) if path is not None]


def _read(config: TrainConfig | None) -> list[str]:
    if config is None:
        return []
    data = config.data
    keys = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    paths = [part.prefix for key in keys for part in data.blend(key)]
    paths += [path for path in (data.tokenizer_model, data.vocab_file, data.merge_file) if path is not None]
    folders = [str(PurePosixPath(path).parent) for path in paths]
    return [*folders, *([config.checkpoint.load] if config.checkpoint.load is not None else [])]


def _outside(paths: Sequence[str], job: JobSpec, profile: ClusterProfile) -> list[str]:
    """Paths that no mount shows yet."""
    mounts = (*profile.container.mounts, *job.mounts)
    return [path for path in paths if on_host(path, mounts) is None]

"""Submit and resume as plans: checked without writing or starting anything. llmctl.submit.execute carries them out."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from llmctl import __version__
from llmctl.backends import capabilities_of
from llmctl.backends.base import JobRequest
from llmctl.context import Context, check_secrets, is_remote, resolve_profile_paths
from llmctl.errors import RecordError, UsageError
from llmctl.runs.record import RUN_ID, RunRecord, new_run_id
from llmctl.site.job import JobError, JobSpec
from llmctl.site.profile import ClusterProfile, overlay
from llmctl.submit import checks
from llmctl.submit.container_checks import check_container
from llmctl.submit.cost import JobCost
from llmctl.submit.layout import PlacedJob, image_file, place_job
from llmctl.submit.path_checks import (
    PathCheck,
    config_checks,
    image_check,
    new_run_check,
    run_path_checks,
    runs_root_check,
)
from llmctl.submit.render import RenderedJob
from llmctl.submit.request import check_group, check_launcher
from llmctl.submit.resolve import Flag, Origin, Resolved, find_config, parse_settings, resolve
from llmctl.submit.site_limits import check_limits
from llmctl.transport.protocol import transport_for
from trainer.config.train_config import TrainConfig

if TYPE_CHECKING:
    from llmctl.submit.snapshot import UserCode
    from llmctl.transport.host_group import HostGroup


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Attributes:
        config: CONFIG as typed; None if it was left out.
        cluster: name of the cluster and where the name came from.
        flags: flags that set a key of the job section.
        settings: ``key=value`` of every --set.
        env: ``NAME=VALUE`` of every --env.
        secrets: NAME of every --secret.
        after: run that must have ended well before; ``any:RUN``: however.
        command: COMMAND; empty for the trainer.
        run_id: as asked for, or None for a new one.
        installed: use the environment's trainer instead of a snapshot of llmctl's own.
        dry_run: ask no scheduler, and of another machine nothing but what the script cannot be written without.
    """

    config: str | None
    cluster: tuple[str, str]
    flags: tuple[Flag, ...] = ()
    settings: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    after: str | None = None
    command: tuple[str, ...] = ()
    run_id: str | None = None
    installed: bool = False
    dry_run: bool = False


@dataclass(frozen=True)
class Plan:
    """A submission that has passed every check: what is written, and what is run.

    Attributes:
        record: the run's record as it will be once the job is accepted, but for the jobs.
        number: of this submission of the run.
        placed: size, script and commands.
        job: what the user asked for.
        profile: of the cluster.
        user_code: the user's project, if any of it is taken along.
        installed: use the environment's trainer.
        is_new: whether the run directory is to be made.
        warnings: what the user should know, for standard error.
    """

    record: RunRecord
    number: int
    placed: PlacedJob
    job: JobSpec
    profile: ClusterProfile
    user_code: "UserCode | None"
    installed: bool
    is_new: bool
    warnings: tuple[str, ...] = ()

    @property
    def rendered(self) -> RenderedJob:
        """Script and commands."""
        return self.placed.rendered

    @property
    def request(self) -> JobRequest:
        """What the scheduler is asked for."""
        return self.placed.request

    @property
    def has_queue(self) -> bool:
        """Whether the job waits in a scheduler's queue, rather than being started."""
        return capabilities_of(self.profile.scheduler).has_queue

    @property
    def cost(self) -> JobCost | None:
        """What is asked for and charged at most; None where nothing asks for it."""
        return JobCost.of(self.request) if self.has_queue else None


def plan_submission(context: Context, request: Request) -> Plan:
    """Resolve, check and render; reads files, writes and starts nothing.

    Raises:
        UsageError, ConfigFileError, ProfileError: the first thing that is wrong, by flag or by file and key.
    """
    profile = resolve_profile_paths(context.profile(*request.cluster), context)
    is_command = bool(request.command)
    path, warning = (None, "") if is_command and request.config is None else find_config(context, request.config)
    resolved = resolve(context, profile, path, _flags(request), job_only=is_command)
    if request.after is not None:  # known to the command line only: it names a run, which no config can
        resolved = replace(resolved, origins={**resolved.origins, "job.after": Origin("--after", is_flag=True)})
    config = None if is_command else checks.check_config(resolved)
    section = config.job if config is not None else checks.check_job_section(resolved)
    default_name = Path(request.command[0]).name if is_command else path.stem if path is not None else "run"
    job = checks.check_job(resolved, section, _as_name(default_name), after=request.after, command=request.command)
    run_id = _run_id(request.run_id, job.name)
    run_dir = Path(str(profile.runs_root)) / run_id
    path_checks = [new_run_check(str(run_dir), run_id)] if request.run_id is not None else []
    warnings = _check(context, resolved, job, config, profile, path_checks=path_checks, dry_run=request.dry_run)
    user_code = _find_user_code(job, context)
    after: dict[str, Any] = {}
    if job.after is not None:
        from llmctl.submit.dependencies import jobs_before

        before = jobs_before(context, job.after, profile, asks_scheduler=not request.dry_run)
        after = {"after_ids": before.ids, "after_any": before.is_any}
        warnings = (*warnings, *before.warnings)
    placed = place_job(context, resolved, job, config, profile, run_dir, submission=1, **after)
    record = RunRecord(
        run_id=run_id,
        name=job.name,
        created=time.time(),
        llmctl_version=__version__,
        cluster=profile.name,
        run_dir=run_dir,
        command=context.argv,
        job=job.as_plain(),
        config=None if config is None else _plain_config(config),
        origins={key: origin.text for key, origin in sorted(resolved.origins.items())},
        code={
            "trainer": None,
            "commit": user_code.commit if user_code else None,
            "diff": user_code.diff if user_code else None,
        },
        cwd=None if is_remote(profile) else str(context.cwd),
    )
    return Plan(
        record=record,
        number=1,
        placed=placed,
        job=job,
        profile=profile,
        user_code=user_code,
        installed=request.installed,
        is_new=True,
        warnings=(*([warning] if warning else []), *warnings),
    )


def plan_resume(
    context: Context,
    record: RunRecord,
    *,
    nodes: int | None = None,
    settings: Sequence[str] = (),
    dry_run: bool = False,
) -> Plan:
    """The next submission of a run, in its run directory and with its code. Whether the run has ended is not asked.

    Args:
        context: environment (values of secrets), working directory and folders.
        record: of the run.
        nodes: another number of nodes.
        settings: ``key=value`` laid over the run's config.
        dry_run: ask no scheduler, and look at no path of another machine.

    Raises:
        UsageError, ConfigFileError, ProfileError: the first thing that is wrong, by flag or by file and key.
        RecordError: the record's job cannot be understood, or the run's code is gone.
    """
    profile = resolve_profile_paths(context.profile(record.cluster, f"run {record.run_id}"), context)
    flags = [*parse_settings(settings), *([Flag("--nodes", "job.nodes", nodes)] if nodes is not None else [])]
    resolved = _resolve_again(context, profile, record, flags)
    config = None if record.config is None else checks.check_config(resolved)
    section = config.job if config is not None else checks.check_job_section(resolved)
    try:
        before = JobSpec.from_plain(record.job)
    except (JobError, TypeError) as error:
        raise RecordError(f"{record.run_dir / 'run.json'}: job: {error}") from None
    job = checks.check_job(resolved, section, record.name, after=None, command=before.command)
    job = replace(job, name=record.name)
    path_checks = [checks.snapshot_check(record)]
    warnings = _check(context, resolved, job, config, profile, path_checks=path_checks, dry_run=dry_run)
    number = max((submission.number for submission in record.submissions), default=0) + 1
    placed = place_job(context, resolved, job, config, profile, record.run_dir, submission=number, cwd=record.cwd)
    origins = {**record.origins, **{key: origin.text for key, origin in resolved.origins.items() if origin.is_flag}}
    return Plan(
        record=replace(
            record,
            job=job.as_plain(),
            config=None if config is None else _plain_config(config),
            origins=origins,
        ),
        number=number,
        placed=placed,
        job=job,
        profile=profile,
        user_code=None,
        installed=record.code.get("trainer") is None,
        is_new=False,
        warnings=warnings,
    )


def _flags(request: Request) -> list[Flag]:
    flags = [*parse_settings(request.settings), *request.flags]
    for entry in request.env:
        name, equals, value = entry.partition("=")
        if not equals or not name:
            raise UsageError(f"--env {entry}: give NAME=VALUE; a value that must stay hidden goes by --secret NAME")
        flags.append(Flag("--env", f"job.env.{name}", value))
    if request.secrets:
        flags.append(Flag("--secret", "job.secrets", list(request.secrets), adds=True))
    return flags


def _resolve_again(context: Context, profile: ClusterProfile, record: RunRecord, flags: Sequence[Flag]) -> Resolved:
    """The record's values in the place of a config file, with the flags of this resume over them."""
    values = dict(record.config) if record.config is not None else {"job": _job_section(record.job)}
    over = resolve(context, profile, None, flags, job_only=record.config is None)
    file = str(record.run_dir / "config.yaml")
    origins = {key: Origin(file) for key in record.origins} | dict(over.origins)
    return Resolved(overlay(values, over.values), origins, file, values)


def _job_section(job: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in job.items() if key not in ("after", "command", "time_s")}
    seconds = job.get("time_s")
    if seconds is not None:
        kept["time"] = f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return {key: list(value) if isinstance(value, tuple) else value for key, value in kept.items()}


def _check(
    context: Context,
    resolved: Resolved,
    job: JobSpec,
    config: TrainConfig | None,
    profile: ClusterProfile,
    *,
    path_checks: Sequence[PathCheck],
    dry_run: bool,
) -> tuple[str, ...]:
    """Everything that is refused before the queue, but for the size; returns what the user should know.

    All paths are looked at in one round trip; those of another machine not for a dry run.
    """
    checks.check_offered(resolved, job, profile)
    check_launcher(resolved, job, profile)
    check_group(job, profile, context.folders)
    check_container(resolved, job, profile, context.folders)
    check_limits(resolved, job, profile)
    if capabilities_of(profile.scheduler).starts_on_hosts:
        from llmctl.submit.ssh_checks import check_hosts, check_unshared

        check_hosts(resolved, job, profile)
        check_unshared(resolved, job, config, profile)
    check_secrets(job.secrets, context.environment)
    paths = list(config_checks(resolved, config, job, profile)) if config is not None else []
    image = image_file(context, job, profile)
    paths += [image_check(resolved, image)] if image is not None else []
    paths += [runs_root_check(profile, context), *path_checks]
    transport = transport_for(context.connect(profile), job.nodes)
    if dry_run and transport.is_remote:
        return (f"not looked at on {transport.host}: {', '.join(dict.fromkeys(check.path for check in paths))}",)
    if capabilities_of(profile.scheduler).starts_on_hosts:
        cast("HostGroup", transport).check_reachable()
    run_path_checks(paths, transport)
    return ()


def _find_user_code(job: JobSpec, context: Context) -> "UserCode | None":
    if not job.code:
        return None
    from llmctl.submit.snapshot import find_user_code

    return find_user_code(job.code, context.transport)


def _run_id(asked: str | None, name: str) -> str:
    if asked is None:
        return new_run_id(name, time.strftime("%y%m%d-%H%M%S"))
    if not RUN_ID.fullmatch(asked):
        raise UsageError(
            f"--run-id {asked}: is not valid: up to 128 letters, digits, dots, dashes and underscores, "
            "beginning with a letter or digit"
        )
    return asked


def _as_name(text: str) -> str:
    kept = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in text)
    return kept.lstrip("._-")[:64] or "run"


def _plain_config(config: TrainConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")

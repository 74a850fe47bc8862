"""Submit and resume as plans: checked without writing or starting anything. llmctl.perform carries them out."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from llmctl import __version__, submit_checks
from llmctl.backends import load_backend
from llmctl.backends.base import JobRequest
from llmctl.cluster_paths import (
    PathWish,
    check_wishes,
    config_wishes,
    image_wish,
    new_run_wish,
    runs_root_wish,
)
from llmctl.container_checks import check_container
from llmctl.cost import JobCost
from llmctl.errors import RecordError, UsageError
from llmctl.hands import hands_for
from llmctl.invocation import Invocation, is_remote
from llmctl.job import JobError, JobSpec
from llmctl.job_request import check_group, check_launcher
from llmctl.placed_job import PlacedJob, image_file, place_job
from llmctl.profile import ClusterProfile, overlay
from llmctl.render import RenderedJob
from llmctl.resolve import Flag, Origin, Resolved, find_config, parse_settings, resolve
from llmctl.run_record import RUN_ID, RunRecord, new_run_id
from llmctl.secrets import check_secrets
from llmctl.settled_profile import settle_profile
from llmctl.site_limits import check_limits
from trainer.config import TrainConfig

if TYPE_CHECKING:
    from llmctl.host_group import HostGroup
    from llmctl.snapshot import UserCode


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
        template: file of a template for job.sh; None: the scheduler's own.
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
    template: str | None = None


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
        remarks: what the user should know, for standard error.
    """

    record: RunRecord
    number: int
    placed: PlacedJob
    job: JobSpec
    profile: ClusterProfile
    user_code: "UserCode | None"
    installed: bool
    is_new: bool
    remarks: tuple[str, ...] = ()

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
        return load_backend(self.profile.scheduler).has_queue

    @property
    def cost(self) -> JobCost | None:
        """What is asked for and charged at most; None where nothing asks for it."""
        return JobCost.of(self.request) if self.has_queue else None


def plan_submission(invocation: Invocation, request: Request) -> Plan:
    """Resolve, check and render; reads files, writes and starts nothing.

    Raises:
        UsageError, ConfigFileError, ProfileError: the first thing that is wrong, by flag or by file and key.
    """
    profile = settle_profile(invocation.profile(*request.cluster), invocation)
    is_command = bool(request.command)
    path, remark = (None, "") if is_command and request.config is None else find_config(invocation, request.config)
    resolved = resolve(invocation, profile, path, _flags(request), job_only=is_command)
    if request.after is not None:  # known to the command line only: it names a run, which no config can
        resolved = replace(resolved, origins={**resolved.origins, "job.after": Origin("--after", is_flag=True)})
    config = None if is_command else submit_checks.check_config(resolved)
    section = config.job if config is not None else submit_checks.check_job_section(resolved)
    default_name = Path(request.command[0]).name if is_command else path.stem if path is not None else "run"
    job = submit_checks.check_job(
        resolved, section, _as_name(default_name), after=request.after, command=request.command
    )
    run_id = _run_id(request.run_id, job.name)
    run_dir = Path(str(profile.runs_root)) / run_id
    wishes = [new_run_wish(str(run_dir), run_id)] if request.run_id is not None else []
    remarks = _check(invocation, resolved, job, config, profile, wishes=wishes, dry_run=request.dry_run)
    user_code = _find_user_code(job, invocation)
    after, more_remarks = _find_jobs_before(invocation, job, profile, dry_run=request.dry_run)
    remarks = (*remarks, *more_remarks)
    template = _read_template(invocation, request.template)
    placed = place_job(invocation, resolved, job, config, profile, run_dir, submission=1, template=template, **after)
    record = RunRecord(
        run_id=run_id,
        name=job.name,
        created=time.time(),
        llmctl_version=__version__,
        cluster=profile.name,
        run_dir=run_dir,
        command=invocation.argv,
        job=job.as_plain(),
        config=None if config is None else _plain_config(config),
        origins={key: origin.text for key, origin in sorted(resolved.origins.items())},
        code={
            "trainer": None,
            "commit": user_code.commit if user_code else None,
            "diff": user_code.diff if user_code else None,
        },
        cwd=None if is_remote(profile) else str(invocation.cwd),
        template=template,
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
        remarks=(*([remark] if remark else []), *remarks),
    )


def plan_resume(
    invocation: Invocation,
    record: RunRecord,
    *,
    nodes: int | None = None,
    settings: Sequence[str] = (),
    dry_run: bool = False,
) -> Plan:
    """The next submission of a run, in its run directory and with its code. Whether the run has ended is not asked.

    Args:
        invocation: environment (values of secrets), working directory and folders.
        record: of the run.
        nodes: another number of nodes.
        settings: ``key=value`` laid over the run's config.
        dry_run: ask no scheduler, and look at no path of another machine.

    Raises:
        UsageError, ConfigFileError, ProfileError: the first thing that is wrong, by flag or by file and key.
        RecordError: the record's job cannot be understood, or the run's code is gone.
    """
    profile = settle_profile(invocation.profile(record.cluster, f"run {record.run_id}"), invocation)
    flags = [*parse_settings(settings), *([Flag("--nodes", "job.nodes", nodes)] if nodes is not None else [])]
    resolved = _resolve_again(invocation, profile, record, flags)
    config = None if record.config is None else submit_checks.check_config(resolved)
    section = config.job if config is not None else submit_checks.check_job_section(resolved)
    try:
        before = JobSpec.from_plain(record.job)
    except (JobError, TypeError) as error:
        raise RecordError(f"{record.run_dir / 'run.json'}: job: {error}") from None
    job = submit_checks.check_job(resolved, section, record.name, after=None, command=before.command)
    job = replace(job, name=record.name)
    wishes = [submit_checks.snapshot_wish(record)]
    remarks = _check(invocation, resolved, job, config, profile, wishes=wishes, dry_run=dry_run)
    number = max((submission.number for submission in record.submissions), default=0) + 1
    template, cwd = record.template, record.cwd
    placed = place_job(
        invocation, resolved, job, config, profile, record.run_dir, submission=number, cwd=cwd, template=template
    )
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
        remarks=remarks,
    )


def _find_jobs_before(
    invocation: Invocation, job: JobSpec, profile: ClusterProfile, *, dry_run: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Arguments of place_job on the jobs that must end before this one, and what the user should know."""
    if job.after is None:
        return {}, ()
    from llmctl.after_run import jobs_before

    before = jobs_before(invocation, job.after, profile, asks_scheduler=not dry_run)
    return {"after_ids": before.ids, "after_any": before.is_any}, before.remarks


def _read_template(invocation: Invocation, file: str | None) -> dict[str, str] | None:
    """Path and text of the user's template for job.sh, which the record keeps for every resume."""
    if file is None:
        return None
    path = invocation.cwd / file
    try:
        return {"path": str(path), "text": path.read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise UsageError(f"--template {file}: cannot be read: {why}") from None


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


def _resolve_again(
    invocation: Invocation, profile: ClusterProfile, record: RunRecord, flags: Sequence[Flag]
) -> Resolved:
    """The record's values in the place of a config file, with the flags of this resume over them."""
    values = dict(record.config) if record.config is not None else {"job": _job_section(record.job)}
    over = resolve(invocation, profile, None, flags, job_only=record.config is None)
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
    invocation: Invocation,
    resolved: Resolved,
    job: JobSpec,
    config: TrainConfig | None,
    profile: ClusterProfile,
    *,
    wishes: Sequence[PathWish],
    dry_run: bool,
) -> tuple[str, ...]:
    """Everything that is refused before the queue, but for the size; returns what the user should know.

    All paths are looked at in one round trip; those of another machine not for a dry run.
    """
    submit_checks.check_offered(resolved, job, profile)
    check_launcher(resolved, job, profile)
    check_group(job, profile, invocation.folders)
    check_container(resolved, job, profile, invocation.folders)
    check_limits(resolved, job, profile)
    if profile.scheduler == "ssh":
        from llmctl.ssh_checks import check_hosts, check_unshared

        check_hosts(resolved, job, profile)
        check_unshared(resolved, job, config, profile)
    check_secrets(job.secrets, invocation.environment)
    paths = list(config_wishes(resolved, config, job, profile)) if config is not None else []
    image = image_file(invocation, job, profile)
    paths += [image_wish(resolved, image)] if image is not None else []
    paths += [runs_root_wish(profile, invocation), *wishes]
    hands = hands_for(invocation.connect(profile), job.nodes)
    if dry_run and hands.is_remote:
        return (f"not looked at on {hands.host}: {', '.join(dict.fromkeys(wish.path for wish in paths))}",)
    if profile.scheduler == "ssh":
        cast("HostGroup", hands).check_reachable()
    check_wishes(paths, hands)
    return ()


def _find_user_code(job: JobSpec, invocation: Invocation) -> "UserCode | None":
    if not job.code:
        return None
    from llmctl.snapshot import find_user_code

    return find_user_code(job.code, invocation.transport)


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

"""Submit and resume: a plan, made and checked without touching anything, and the one function that carries it out.

The order of the acts is what makes a kill at any instant harmless: the run directory is complete and in the index
before the job is started, and job.sh itself writes down who runs it (started.json).
"""

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl import __version__, submit_checks
from llmctl.backends import load_backend
from llmctl.backends.base import HostCommand, JobRequest, SubmittedJob
from llmctl.errors import LlmctlError, RecordError, UsageError
from llmctl.file_acts import FileWrite
from llmctl.gpus import visible_gpus
from llmctl.invocation import Invocation
from llmctl.job import JobError, JobSpec
from llmctl.profile import ClusterProfile, overlay
from llmctl.render import RenderedJob, RunPlace, job_python, render
from llmctl.resolve import Flag, Origin, Resolved, find_config, parse_settings, resolve
from llmctl.run_record import RUN_ID, RunRecord, Submission, new_run_id
from llmctl.secrets import check_secrets, secrets_file, write_secrets
from trainer.config import TrainConfig

if TYPE_CHECKING:
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
        after: run that must have ended before.
        command: COMMAND; empty for the trainer.
        run_id: as asked for, or None for a new one.
        installed: use the environment's trainer instead of a snapshot of llmctl's own.
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


@dataclass(frozen=True)
class Plan:
    """A submission that has passed every check: what is written, and what is run.

    Attributes:
        record: the run's record as it will be once the job is accepted, but for the jobs.
        rendered: script and commands.
        job: what the user asked for.
        profile: of the cluster.
        secrets_file: where the values of the secrets go; None if there are none.
        user_code: the user's project, if any of it is taken along.
        installed: use the environment's trainer.
        is_new: whether the run directory is to be made.
        remarks: what the user should know, for standard error.
    """

    record: RunRecord
    rendered: RenderedJob
    job: JobSpec
    profile: ClusterProfile
    secrets_file: Path | None
    user_code: "UserCode | None"
    installed: bool
    is_new: bool
    remarks: tuple[str, ...] = ()


def plan_submission(invocation: Invocation, request: Request) -> Plan:
    """Resolve, check and render; reads files, writes and starts nothing.

    Raises:
        UsageError, ConfigFileError, ProfileError: the first thing that is wrong, by flag or by file and key.
    """
    profile = invocation.profile(*request.cluster)
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
    run_dir = Path(profile.runs_root) / run_id
    user_code = _check_surroundings(invocation, resolved, job, config, profile)
    if request.run_id is not None:
        submit_checks.check_new_run(run_dir, run_id)
    place = _place(invocation, resolved, job, config, profile, run_dir, submission=1)
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
        cwd=str(invocation.cwd),
    )
    return Plan(
        record=record,
        rendered=render(job, profile, place, invocation.folders, _request(job, profile, place)),
        job=job,
        profile=profile,
        secrets_file=place.secrets_file,
        user_code=user_code,
        installed=request.installed,
        is_new=True,
        remarks=(remark,) if remark else (),
    )


def plan_resume(
    invocation: Invocation, record: RunRecord, *, nodes: int | None = None, settings: Sequence[str] = ()
) -> Plan:
    """The next submission of a run, in its run directory and with its code. Whether the run has ended is not asked.

    Args:
        invocation: environment (values of secrets), working directory and folders.
        record: of the run.
        nodes: another number of nodes.
        settings: ``key=value`` laid over the run's config.

    Raises:
        UsageError, ConfigFileError, ProfileError: the first thing that is wrong, by flag or by file and key.
        RecordError: the record's job cannot be understood, or the run's code is gone.
    """
    profile = invocation.profile(record.cluster, f"run {record.run_id}")
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
    _check_surroundings(invocation, resolved, replace(job, code=()), config, profile)
    number = max((submission.number for submission in record.submissions), default=0) + 1
    submit_checks.check_snapshot(record)
    place = _place(invocation, resolved, job, config, profile, record.run_dir, submission=number)
    if record.cwd is not None and not job.code:
        place = replace(place, working_dir=Path(record.cwd))
    origins = {**record.origins, **{key: origin.text for key, origin in resolved.origins.items() if origin.is_flag}}
    return Plan(
        record=replace(
            record,
            job=job.as_plain(),
            config=None if config is None else _plain_config(config),
            origins=origins,
        ),
        rendered=render(job, profile, place, invocation.folders, _request(job, profile, place)),
        job=job,
        profile=profile,
        secrets_file=place.secrets_file,
        user_code=None,
        installed=record.code.get("trainer") is None,
        is_new=False,
    )


def perform(plan: Plan, invocation: Invocation) -> RunRecord:
    """Carry out a plan: write the run directory, enter the run in the index, start the job, note its id.

    Raises:
        ProfileError: the job's Python has no torch, or the run directory cannot be made or written.
        RecordError: the run is there already, or its record or index entry cannot be written.
        SchedulerError: the job was not accepted; a new run leaves nothing behind.
    """
    # Here and not in the plan: what would be run can be looked at where it cannot be run.
    if plan.record.config is not None:
        submit_checks.check_torch(plan.profile, invocation)
    number = max((submission.number for submission in plan.record.submissions), default=0) + 1
    submission = Submission(number, time.time())
    before = None if plan.is_new else RunRecord.load(plan.record.run_dir, invocation.transport)
    try:
        record = _prepare(plan, invocation, submission, before)
        try:
            jobs = tuple(_start(plan, command, invocation) for command in plan.rendered.commands)
        except (LlmctlError, OSError):  # an interrupt may come after the start: what runs keeps its directory
            _undo(plan, invocation, before)
            raise
    except OSError as error:
        problem = ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)
        raise submit_checks.runs_root_error(plan.profile, invocation, problem) from None
    record = record.with_submission(replace(submission, jobs=jobs))
    record.save(invocation.transport)
    invocation.index.add(record)
    return record


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


def _check_surroundings(
    invocation: Invocation, resolved: Resolved, job: JobSpec, config: TrainConfig | None, profile: ClusterProfile
) -> "UserCode | None":
    submit_checks.check_offered(resolved, job, profile)
    submit_checks.check_launcher(resolved, job, profile)
    check_secrets(job.secrets, invocation.environment)
    if config is not None:
        submit_checks.check_places(resolved, config)
    submit_checks.check_runs_root(profile, invocation)
    if not job.code:
        return None
    from llmctl.snapshot import find_user_code

    return find_user_code(job.code, invocation.transport)


def _place(
    invocation: Invocation,
    resolved: Resolved,
    job: JobSpec,
    config: TrainConfig | None,
    profile: ClusterProfile,
    run_dir: Path,
    *,
    submission: int,
) -> RunPlace:
    on_cpu = config is not None and config.training.device == "cpu"
    gpu_ids = visible_gpus(invocation)
    gpus = submit_checks.place_on_this_machine(resolved, job, gpu_ids, on_cpu=on_cpu)
    ranks_per_node = len(gpus[0]) if gpus else 1
    if config is not None:
        submit_checks.check_layout(resolved, config, job.nodes, ranks_per_node)
    return RunPlace(
        run_id=run_dir.name,
        run_dir=run_dir,
        submission=submission,
        python=job_python(profile, invocation.folders, sys.executable),
        gpus=gpus,
        ranks_per_node=ranks_per_node,
        working_dir=run_dir / "code" / "user" if job.code else invocation.cwd,
        secrets_file=secrets_file(invocation.folders, run_dir.name, submission) if job.secrets else None,
    )


def _request(job: JobSpec, profile: ClusterProfile, place: RunPlace) -> JobRequest:
    return JobRequest(
        profile=profile,
        job_name=place.run_id,
        run_dir=str(place.run_dir),
        nodes=job.nodes,
        ranks_per_node=place.ranks_per_node,
        gpus_per_node=len(place.gpus[0]) if place.gpus else 0,
        time_s=job.time_s,
    )


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


def _prepare(plan: Plan, invocation: Invocation, submission: Submission, before: RunRecord | None) -> RunRecord:
    """Everything but the start; whatever cuts it off, a Ctrl-C too, nothing of it is left."""
    if plan.is_new:
        _make_run_dir(plan)
    try:
        record = _write_run(plan, invocation).with_submission(submission)
        record.save(invocation.transport)
        invocation.index.add(record)
    except BaseException:
        _undo(plan, invocation, before)
        raise
    return record


def _make_run_dir(plan: Plan) -> None:
    run_dir = plan.record.run_dir
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    try:
        run_dir.mkdir(mode=0o700)
    except FileExistsError:
        raise RecordError(f"{run_dir} is there already; submit again for another run id") from None


def _write_run(plan: Plan, invocation: Invocation) -> RunRecord:
    """Code, config, script and secrets; returns the record with the code's address."""
    record, run_dir = plan.record, plan.record.run_dir
    if plan.is_new:
        from llmctl.snapshot import copy_user_code, link_own_code, store_own_code

        (run_dir / "code" / "user").mkdir(parents=True)
        if plan.user_code is not None:
            copy_user_code(run_dir, plan.user_code)
        if not plan.installed:
            address, folder = store_own_code(run_dir.parent)
            link_own_code(run_dir, folder)
            record = replace(record, code={**record.code, "trainer": address})
    if record.config is not None:
        import yaml

        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        text = yaml.dump(dict(record.config), Dumper=dumper, sort_keys=False)
        invocation.transport.write_files([FileWrite(str(run_dir / "config.yaml"), text.encode())])
    if plan.secrets_file is not None:
        write_secrets(plan.secrets_file, plan.job.secrets, invocation.environment)
    script = plan.rendered.script.encode("utf-8", "surrogateescape")
    invocation.transport.write_files([FileWrite(str(plan.rendered.path), script, 0o700)])
    return record


def _start(plan: Plan, command: HostCommand, invocation: Invocation) -> SubmittedJob:
    run_dir = plan.record.run_dir
    identity = invocation.transport.start_detached(command.argv, cwd=str(run_dir), log=str(run_dir / "job.log"))
    job_id = load_backend(plan.profile.scheduler).parse_job_id(str(identity.pid))
    return SubmittedJob(command.host, job_id, identity.pid, identity.start_time, identity.boot_id)


def _undo(plan: Plan, invocation: Invocation, before: RunRecord | None) -> None:
    """Nothing was started: leave nothing of it behind. A run that was there gets its record back."""
    with suppress(OSError, RecordError):
        if plan.secrets_file is not None:
            plan.secrets_file.unlink(missing_ok=True)
        if before is not None:
            before.save(invocation.transport)
            return
        invocation.index.remove(plan.record.run_id)
        shutil.rmtree(plan.record.run_dir, ignore_errors=True)

"""Plans of submit and resume: checked, but nothing is written or started.

llmctl.submit.execute carries plans out. One direction:
Request -> Resolved -> JobSpec -> JobPlan with its JobRequest -> problems -> RenderedJob -> Plan.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl import __version__
from llmctl.context import ClusterSession, Context
from llmctl.errors import UsageError
from llmctl.runs.record import RUN_ID, RunRecord, new_run_id
from llmctl.site.job import parse_nodes
from llmctl.site.profile import overlay
from llmctl.submit.checks import PathCheck, check_job
from llmctl.submit.config_file import find_config, found_config_warning
from llmctl.submit.host_checks import resume_problems
from llmctl.submit.origins import Origin, Problem, Resolved
from llmctl.submit.render import RenderedJob, render
from llmctl.submit.request import JobPlan, plan_job
from llmctl.submit.resolve import (
    Flag,
    job_section,
    job_spec,
    parse_settings,
    recorded_job_spec,
    resolve,
    training_config,
)
from llmctl.transport.file_writes import PathFacts
from trainer.config.train_config import TrainConfig

if TYPE_CHECKING:
    from llmctl.scripts.import_script import ImportedScript
    from llmctl.submit.snapshot import UserCode


@dataclass(frozen=True)
class Request:
    """The command line of a submission.

    Attributes:
        config: CONFIG as typed; None without CONFIG.
        cluster: as typed; None without --cluster.
        flags: flags that set a key of the job section.
        settings: ``key=value`` of every --set.
        env: ``NAME=VALUE`` of every --env.
        secrets: NAME of every --secret.
        after: RUN, to start after the run has completed; ``any:RUN``, to start after any end of the run.
        command: COMMAND; empty for the trainer.
        run_id: as typed; None for a new run id.
        installed: use the environment's trainer instead of a snapshot of llmctl's own.
        template: file of a template for job.sh; None: the scheduler's own.
        dry_run: query no scheduler, and another machine only for facts that the script needs.
        script_arguments: ``NAME=VALUE`` of every --arg, for a CONFIG that is a training script.
    """

    config: str | None
    cluster: str | None
    flags: tuple[Flag, ...] = ()
    settings: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    after: str | None = None
    command: tuple[str, ...] = ()
    run_id: str | None = None
    installed: bool = False
    template: str | None = None
    dry_run: bool = False
    script_arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A submission that has passed every check: files to write and commands to run.

    Attributes:
        record: the run's record after the submission, without the jobs.
        number: of this submission of the run.
        job: the job plan.
        rendered: script and commands.
        user_code: the user's project; None without ``job.code``.
        installed: use the environment's trainer.
        is_new: True if the run directory must be created.
        warnings: for the user, on standard error.
    """

    record: RunRecord
    number: int
    job: JobPlan
    rendered: RenderedJob
    user_code: "UserCode | None"
    installed: bool
    is_new: bool
    warnings: tuple[str, ...] = ()


def plan_submission(context: Context, request: Request) -> Plan:
    """Plan the first submission of a run; reads files, writes and starts nothing.

    Raises:
        UsageError, ConfigFileError, ProfileError: all problems, by flag, file and key, or profile.
    """
    session = ClusterSession.for_jobs(context, *context.cluster(request.cluster))
    profile, is_command = session.profile, bool(request.command)
    path, warning = (None, "") if is_command and request.config is None else find_config(context, request.config)
    default_name = _as_name(Path(request.command[0]).name if is_command else path.stem if path is not None else "run")
    script = _read_script(request, path)
    sections = script.sections if script is not None else None
    resolved = resolve(context, session, path, _flags(request), job_only=is_command, script=sections)
    if request.after is not None:  # only a flag, no config key: --after names a run
        resolved = replace(resolved, origins={**resolved.origins, "job.after": Origin("--after", is_flag=True)})
    if request.config is None and path is not None:
        warning = found_config_warning(context, path, resolved.below_flags) or warning
    config = None if is_command else training_config(resolved)
    section = config.job if config is not None else job_section(resolved)
    spec = job_spec(resolved, section, default_name, after=request.after, command=request.command)
    now = time.strftime("%y%m%d-%H%M%S")
    run_id = new_run_id(spec.name, now) if request.run_id is None else _valid_run_id(request.run_id)
    run_dir = Path(str(profile.runs_root)) / run_id
    job = plan_job(context, session, spec, config, run_dir)
    own_paths = [_new_run(str(run_dir), run_id)] if request.run_id is not None else []
    warnings = [warning] if warning else []
    if script is not None and script.ignored:
        warnings.append(
            f"{request.config}: {script.ignored} words have no effect here; "
            "llmctl import-script shows each with its reason"
        )
    warnings += check_job(context, session, resolved, job, own_paths, dry_run=request.dry_run)
    user_code = None
    if spec.code:
        from llmctl.submit.snapshot import find_user_code

        user_code = find_user_code(spec.code, context.transport)
    if spec.after is not None:
        from llmctl.submit.dependencies import find_dependencies

        before = find_dependencies(context, spec.after, profile, asks_scheduler=not request.dry_run)
        job = replace(job, request=replace(job.request, after=before.ids, after_any=before.is_any))
        warnings += before.warnings
    template = _read_template(context, request.template) if request.template is not None else None
    rendered = render(job, template=template)
    return Plan(
        record=_first_record(context, job, resolved, user_code, template),
        number=1,
        job=job,
        rendered=rendered,
        user_code=user_code,
        installed=request.installed,
        is_new=True,
        warnings=tuple(warnings),
    )


def _read_script(request: Request, path: Path | None) -> "ImportedScript | None":
    """The config that a training script asks for; None for a config file, or without any."""
    if path is None and not request.script_arguments:
        return None
    from llmctl.scripts.import_script import import_script, is_script, parse_given

    given = parse_given(request.script_arguments)
    if path is not None and is_script(path):
        return import_script(path, request.config or str(path), given, datetime.now())
    if given:
        raise UsageError("--arg: goes with a training script; set a config's key with --set")
    return None


def plan_resume(
    context: Context,
    record: RunRecord,
    *,
    nodes: int | None = None,
    exclude: str | None = None,
    settings: Sequence[str] = (),
    dry_run: bool = False,
) -> Plan:
    """Plan the next submission of a run, in its run directory and with its code.

    The caller has checked that the run has ended.

    Args:
        context: environment (values of secrets), working directory and folders.
        record: of the run.
        nodes: new number of nodes; None keeps the number.
        exclude: names of nodes to leave out, with commas between; None leaves out the same as before.
        settings: ``key=value`` laid over the run's config.
        dry_run: query no scheduler, and check no path of another machine.

    Raises:
        UsageError, ConfigFileError, ProfileError: all problems, by flag, file and key, or profile.
        RecordError: the record's job is invalid, or the snapshot of the run's code is missing.
    """
    before = recorded_job_spec(record)
    session = ClusterSession.for_jobs(context, record.cluster, f"run {record.run_id}")
    flags = _resume_flags(settings, nodes, exclude)
    resolved = _resolve_again(context, session, record, flags)
    config = None if record.config is None else training_config(resolved)
    section = config.job if config is not None else job_section(resolved)
    spec = job_spec(resolved, section, record.name, after=None, command=before.command)
    spec = replace(spec, name=record.name)
    number = max((submission.number for submission in record.submissions), default=0) + 1
    job = plan_job(context, session, spec, config, record.run_dir, submission=number, cwd=record.cwd)
    if problems := list(resume_problems(record, job)):
        raise resolved.error(problems)
    warnings = check_job(context, session, resolved, job, [_trainer_snapshot(record)], dry_run=dry_run)
    if spec.exclude and "job.exclude" not in {flag.key for flag in flags}:
        warnings.append(f"leaves out {', '.join(spec.exclude)}, as before; --exclude '' leaves out none")
    origins = {**record.origins, **{key: origin.text for key, origin in resolved.origins.items() if origin.is_flag}}
    return Plan(
        record=replace(
            record,
            job=spec.as_plain(),
            config=None if config is None else _known_to_code(_plain_config(config), record, flags),
            origins=origins,
        ),
        number=number,
        job=job,
        rendered=render(job, template=record.template),
        user_code=None,
        installed=record.code.get("trainer") is None,
        is_new=False,
        warnings=tuple(warnings),
    )


def _resume_flags(settings: Sequence[str], nodes: int | None, exclude: str | None) -> list[Flag]:
    flags = parse_settings(settings)
    if nodes is not None:
        flags.append(Flag("--nodes", "job.nodes", nodes))
    if exclude is not None:
        flags.append(Flag("--exclude", "job.exclude", parse_nodes(exclude)))
    return flags


def _first_record(
    context: Context,
    job: JobPlan,
    resolved: Resolved,
    user_code: "UserCode | None",
    template: Mapping[str, str] | None,
) -> RunRecord:
    """The record of a new run, before its first submission."""
    origins = {key: origin.text for key, origin in sorted(resolved.origins.items())}
    return RunRecord(
        run_id=job.layout.run_id,
        name=job.spec.name,
        created=time.time(),
        llmctl_version=__version__,
        cluster=job.profile.name,
        run_dir=job.layout.run_dir,
        command=context.argv,
        job=job.spec.as_plain(),
        config=None if job.config is None else _plain_config(job.config),
        origins=origins,
        code={
            "trainer": None,
            "commit": user_code.commit if user_code else None,
            "diff": user_code.diff if user_code else None,
        },
        cwd=None if job.is_remote else str(context.cwd),
        template=template,
    )


def _new_run(run_dir: str, run_id: str) -> PathCheck:
    """Check that no run has this --run-id."""

    def judge(facts: Mapping[str, PathFacts]) -> Problem | None:
        if not facts[run_dir].kind:
            return None
        return Problem(
            f"--run-id {run_id}", f"{run_dir} exists already; give another run id, or leave the flag out", of="flag"
        )

    return PathCheck((run_dir,), judge)


def _trainer_snapshot(record: RunRecord) -> PathCheck:
    """Check that the snapshot of the run's trainer still exists."""
    code = f"{record.run_dir}/code/trainer"

    def judge(facts: Mapping[str, PathFacts]) -> Problem | None:
        if record.code.get("trainer") is None or facts[code].kind == "folder":
            return None
        remedy = "submit its command again as a new run"
        if record.config is not None:
            remedy = f"llmctl submit {record.run_dir}/config.yaml --set checkpoint.load={record.run_dir}/checkpoints"
        return Problem("", f"{code}: the snapshot of the run's trainer is missing\n{remedy}", of="run")

    return PathCheck((code,), judge)


def _flags(request: Request) -> list[Flag]:
    flags = [*parse_settings(request.settings), *request.flags]
    for entry in request.env:
        name, equals, value = entry.partition("=")
        if not equals or not name:
            raise UsageError(f"--env {entry}: give NAME=VALUE, or --secret NAME for a value that must stay hidden")
        flags.append(Flag("--env", f"job.env.{name}", value))
    if request.secrets:
        flags.append(Flag("--secret", "job.secrets", list(request.secrets), adds=True))
    return flags


def _resolve_again(context: Context, session: ClusterSession, record: RunRecord, flags: Sequence[Flag]) -> Resolved:
    """The record's values as a config file, overridden by the flags of this resume."""
    values = dict(record.config) if record.config is not None else {"job": _job_section(record.job)}
    over = resolve(context, session, None, flags, job_only=record.config is None)
    file = str(record.run_dir / "config.yaml")
    origins = {key: Origin(file) for key in record.origins} | dict(over.origins)
    return Resolved(overlay(values, over.values), origins, file, over.cluster, values)


def _job_section(job: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in job.items() if key not in ("after", "command", "time_s")}
    seconds = job.get("time_s")
    if seconds is not None:
        kept["time"] = f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return {key: list(value) if isinstance(value, tuple) else value for key, value in kept.items()}


def _read_template(context: Context, file: str) -> dict[str, str]:
    """Path and text of the user's template for job.sh; the record keeps both for every resume."""
    path = context.cwd / file
    try:
        return {"path": str(path), "text": path.read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise UsageError(f"--template {file}: cannot be read: {why}") from None


def _valid_run_id(asked: str) -> str:
    if not RUN_ID.fullmatch(asked):
        raise UsageError(
            f"--run-id {asked}: is not valid: give up to 128 letters, digits, dots, dashes and underscores, "
            "beginning with a letter or digit"
        )
    return asked


def _as_name(text: str) -> str:
    kept = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in text)
    return kept.lstrip("._-")[:64] or "run"


def _known_to_code(config: dict[str, Any], record: RunRecord, flags: Sequence[Flag]) -> dict[str, Any]:
    """The values of a resumed run that the run's own code knows.

    A later llmctl may have further keys, which that code refuses; without a flag they have their defaults.
    """
    before, given = record.config or {}, {flag.key for flag in flags}
    kept = {
        section: {
            key: value for key, value in values.items() if key in before.get(section, {}) or f"{section}.{key}" in given
        }
        for section, values in config.items()
    }
    return {section: values for section, values in kept.items() if values or section in before}


def _plain_config(config: TrainConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")

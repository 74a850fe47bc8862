"""Plan of a resume: the next submission of a run, in its directory; see plan.py."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmctl.context import ClusterSession, Context
from llmctl.runs.record import RunRecord
from llmctl.site.job import JobSpec, parse_nodes
from llmctl.site.profile import overlay
from llmctl.submit.check_job import check_job, leave_out
from llmctl.submit.checks.hosts import resume_problems
from llmctl.submit.config_file import training_config
from llmctl.submit.decide import decide_job
from llmctl.submit.job import Flag, Job, PathCheck, Problem, SubmitPlan
from llmctl.submit.origins import Origin, Resolved
from llmctl.submit.render import render
from llmctl.submit.resolve import job_section, job_spec, parse_settings, recorded_job_spec, resolve
from llmctl.transport.file_writes import PathFacts
from trainer.config.sections.training import replace_removed_backends

if TYPE_CHECKING:
    from trainer.config.sections.job import JobConfig

_OLD_TRAINER = '\nexec "$0" -m trainer '
_FOUND_TRAINER = '\nPYTHONPATH="$LLMCTL_RUN_DIR/code${PYTHONPATH:+:$PYTHONPATH}" exec "$0" -m trainer '


def plan_resume(
    context: Context,
    record: RunRecord,
    *,
    nodes: int | None = None,
    exclude: str | None = None,
    settings: Sequence[str] | Mapping[str, Any] = (),
    dry_run: bool = False,
) -> SubmitPlan:
    """Plan the next submission of a run, in its run directory and with its code.

    The caller has checked that the run has ended.

    Args:
        context: environment (values of secrets), working directory and folders.
        record: of the run.
        nodes: new number of nodes; None keeps the number.
        exclude: names of nodes to leave out, with commas between; None leaves out the same as before.
        settings: ``key=value`` laid over the run's config; or values by dotted key.
        dry_run: query no scheduler, and check no path of another machine.

    Raises:
        UsageError, ConfigFileError, ProfileError: all problems, by flag, file and key, or profile.
        RecordError: the record's job is invalid, or the snapshot of the run's code is missing.
    """
    before = recorded_job_spec(record)
    session = _session_of(context, record, asks=not dry_run)
    flags = _resume_flags(settings, nodes, exclude)
    resolved, warnings = _resolve_again(context, session, record, flags)
    config = None if record.config is None else training_config(resolved)
    section = config.job if config is not None else job_section(resolved)
    spec = _next_spec(before, record.name, resolved, section)
    number = max((submission.number for submission in record.submissions), default=0) + 1
    job = decide_job(context, session, spec, config, record.run_dir, submission=number, cwd=record.cwd)
    # Of hosts that share no files, a run stays on those that have it.
    moves = not job.request.hosts or job.profile.shared
    job = leave_out(session, job, warnings, dry_run=dry_run, moves=moves)
    asks = not (dry_run and job.is_remote)
    if problems := [*resume_problems(record, job), *(_model_problems(job, flags, session) if asks else ())]:
        raise resolved.error(problems)
    checked = _without_used_start(job, session) if asks else job
    warnings += check_job(session, resolved, checked, [_trainer_snapshot(record)], dry_run=dry_run)
    # The nodes were left out for a fault that may be mended by now.
    if spec.exclude and "job.exclude" not in {flag.key for flag in flags}:
        warnings.append(f"leaves out {', '.join(spec.exclude)}, as before; --exclude '' leaves out none")
    origins = {**record.origins, **{key: origin.text for key, origin in resolved.origins.items() if origin.is_flag}}
    return SubmitPlan(
        record=replace(
            record,
            job=spec.as_plain(),
            config=None if config is None else _known_to_code(config.model_dump(mode="json"), record, flags),
            origins=origins,
        ),
        job=job,
        rendered=render(job, template=record.template),
        user_code=None,
        installed=record.code.get("trainer") is None,
        is_new=False,
        warnings=tuple(warnings),
    )


def _session_of(context: Context, record: RunRecord, *, asks: bool) -> ClusterSession:
    """The cluster of a run. Without a runs_root, it is the folder that the run is in."""
    session = ClusterSession.for_jobs(context, record.cluster, f"run {record.run_id}", asks=asks)
    if session.profile.runs_root is not None:
        return session
    root = str(record.run_dir.parent)
    return replace(session, profile=session.profile.model_copy(update={"runs_root": root}))


def _next_spec(before: JobSpec, name: str, resolved: Resolved, section: "JobConfig") -> JobSpec:
    """The job with its new values, under its old name, which the run directory and the index have."""
    # Until 0.2.0, jobs such as `data prepare` found the trainer by a PYTHONPATH that had it for every COMMAND.
    command = tuple(word.replace(_OLD_TRAINER, _FOUND_TRAINER) for word in before.command)
    spec = job_spec(resolved, section, name, after=None, command=command, torchrun=before.torchrun)
    return replace(spec, name=name)


def _resume_flags(settings: Sequence[str] | Mapping[str, Any], nodes: int | None, exclude: str | None) -> list[Flag]:
    flags = parse_settings(settings)
    if nodes is not None:
        flags.append(Flag("--nodes", "job.nodes", nodes))
    if exclude is not None:
        flags.append(Flag("--exclude", "job.exclude", parse_nodes(exclude)))
    return flags


def _model_problems(job: Job, flags: Sequence[Flag], session: ClusterSession) -> list[Problem]:
    if job.config is None or not any(flag.key.startswith("model.") for flag in flags):
        return []
    from llmctl.submit.checks.resumed_model import resumed_model_problems

    return resumed_model_problems(job, job.config, flags, session.transport)


def _without_used_start(job: Job, session: ClusterSession) -> Job:
    """The job without its start point, if it goes on from a checkpoint of its own: the start may be gone by then."""
    config = job.config
    if config is None or config.checkpoint.load is None:
        return job
    from llmctl.site.container import on_host
    from trainer.config.foreign_formats import Listing

    folder = config.checkpoint.save or f"{job.run_dir}/checkpoints"
    place = on_host(folder, (*job.profile.container.mounts, *job.spec.mounts)) or folder
    (names,) = session.transport.list_names([place])
    if not Listing(names).holds_checkpoints:
        return job
    own = config.checkpoint.model_copy(update={"load": None, "exit_on_missing_checkpoint": False})
    return replace(job, config=config.model_copy(update={"checkpoint": own}))


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


def _resolve_again(
    context: Context, session: ClusterSession, record: RunRecord, flags: Sequence[Flag]
) -> tuple[Resolved, list[str]]:
    """The record's values as a config file, overridden by the flags of this resume; and notes on old values."""
    values, notes = {"job": _job_section(record.job)}, list[str]()
    if record.config is not None:
        values, notes = replace_removed_backends(record.config)
    over = resolve(context, session, None, flags, job_only=record.config is None)
    file = str(record.run_dir / "config.yaml")
    origins = {key: Origin(file) for key in record.origins} | dict(over.origins)
    return Resolved(overlay(values, over.values), origins, file, over.cluster, values), notes


def _job_section(job: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in job.items() if key not in ("after", "command", "torchrun", "time_s")}
    seconds = job.get("time_s")
    if seconds is not None:
        kept["time"] = f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return {key: list(value) if isinstance(value, tuple) else value for key, value in kept.items()}


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

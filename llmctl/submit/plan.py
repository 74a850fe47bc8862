"""Plan of a submission: checked, but nothing is written or started; llmctl.submit.execute carries it out.

One direction: SubmitArguments -> Resolved -> JobSpec -> Job -> problems -> RenderedJob -> SubmitPlan (see job.py).
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl import __version__
from llmctl.context import ClusterSession, Context
from llmctl.errors import UsageError
from llmctl.runs.record import RUN_ID, RunRecord, new_run_id
from llmctl.site.job import JobSpec
from llmctl.submit.check_job import check_job, leave_out
from llmctl.submit.decide import decide_job
from llmctl.submit.job import ConfigFile, Flag, Job, PathCheck, Problem, SubmitArguments, SubmitPlan
from llmctl.submit.origins import Origin, Resolved
from llmctl.submit.render import render
from llmctl.submit.resolve import job_section, job_spec, parse_settings, resolve
from llmctl.transport.file_writes import PathFacts

if TYPE_CHECKING:
    from llmctl.site.profile import ClusterProfile
    from llmctl.submit.user_code import UserCode
    from trainer.config.sections.job import JobConfig


JOB_FLAGS = {
    "nodes": "--nodes",
    "gpus_per_node": "--gpus-per-node",
    "time": "--time",
    "name": "--name",
    "group": "--group",
    "resource_type": "--resource-type",
    "queue": "--queue",
    "reservation": "--reservation",
    "priority": "--priority",
    "exclude": "--exclude",
    "container": "--container",
    "mounts": "--mount",
    "launcher": "--launcher",
    "notify": "--notify",
    "notify_on": "--notify-on",
    "max_restarts": "--max-restarts",
    "restart_on": "--restart-on",
    "spare_nodes": "--spare-nodes",
    "hang_timeout_s": "--hang-timeout",
    "preflight": "--preflight",
    "chain": "--chain",
}
"""Key of the config's job section, also the name of the parameter -> flag."""
_LISTS = ("mounts", "notify")
"""Keys whose flags add to the list of the config file."""


def _job_flags(given: Mapping[str, Any]) -> tuple[Flag, ...]:
    """The flags that set keys of the job section.

    Args:
        given: see SubmitArguments.
    """
    from llmctl.site.job import parse_nodes

    values = {key: given[key] for key in JOB_FLAGS if given.get(key) is not None}
    if isinstance(values.get("exclude"), str):
        values["exclude"] = parse_nodes(values["exclude"])
    return tuple(
        Flag(JOB_FLAGS[key], f"job.{key}", list(value) if isinstance(value, tuple) else value, adds=key in _LISTS)
        for key, value in values.items()
    )


def plan_submission(context: Context, arguments: SubmitArguments) -> SubmitPlan:
    """Plan the first submission of a run; reads files, writes and starts nothing.

    Raises:
        UsageError, ConfigFileError, ProfileError: all problems, by flag, file and key, or profile.
    """
    session, resolved, default_name, warnings = given_values(context, arguments)
    config = None
    if not arguments.command:
        from llmctl.submit.config_file import training_config

        resolved, notes = _from_start(context, session, arguments, resolved)
        warnings += notes
        config = training_config(resolved)
    section = config.job if config is not None else job_section(resolved)
    spec = _spec(arguments, resolved, section, default_name)
    if arguments.dry_run or session.profile.runs_root is None:
        session, notes = _with_unset_values(context, session, spec, dry_run=arguments.dry_run)
        warnings += notes
    profile = session.profile
    now = time.strftime("%y%m%d-%H%M%S")
    run_id = new_run_id(spec.name, now) if arguments.run_id is None else _valid_run_id(arguments.run_id)
    run_dir = Path(str(profile.runs_root)) / run_id
    decided = decide_job(context, session, spec, config, run_dir)
    job = leave_out(session, decided, warnings, dry_run=arguments.dry_run)
    own_paths = [_new_run(str(run_dir), run_id)] if arguments.run_id is not None else []
    user_code = None
    if spec.code:
        from llmctl.submit.user_code import find_user_code

        user_code = find_user_code(spec.code, context.transport, trains=config is not None)
    warnings += check_job(session, resolved, job, own_paths, user_code, dry_run=arguments.dry_run)
    if spec.after is not None:
        from llmctl.submit.dependencies import find_dependencies

        before = find_dependencies(context, spec.after, profile, asks_scheduler=not arguments.dry_run)
        job = replace(job, request=replace(job.request, after=before.ids, after_any=before.is_any))
        warnings += before.warnings
    template = _read_template(context, arguments.template) if arguments.template is not None else None
    record, rendered = _first_record(context, job, resolved, user_code, template), render(job, template=template)
    if arguments.dry_run:
        warnings += _placeholder_notes(profile, f"{rendered}{record.config}")
    return SubmitPlan(
        record=record,
        job=job,
        rendered=rendered,
        user_code=user_code,
        installed=arguments.installed,
        is_new=True,
        warnings=tuple(warnings),
    )


def given_values(context: Context, arguments: SubmitArguments) -> tuple[ClusterSession, Resolved, str, list[str]]:
    """The cluster, the values of file and flags as they were given, the run's default name, and warnings.

    Raises:
        UsageError, ConfigFileError, ProfileError: the cluster is unknown, or the file cannot be read.
    """
    session = ClusterSession.for_jobs(context, *context.cluster(arguments.cluster), asks=not arguments.dry_run)
    if arguments.environment is not None:
        session = _with_environment(session, arguments.environment)
    file = _read_config(context, arguments)
    default_name = _default_name(arguments, file)
    resolved, warnings = _resolve_arguments(context, session, arguments, file)
    return session, resolved, default_name, warnings


def _with_environment(session: ClusterSession, path: str) -> ClusterSession:
    """The session with the virtual environment at ``path``, absolute, in place of the profile's environment."""
    software = session.profile.environment.model_copy(update={"kind": "venv", "path": path, "python": None})
    return replace(session, profile=session.profile.model_copy(update={"environment": software}))


def _resolve_arguments(
    context: Context, session: ClusterSession, arguments: SubmitArguments, file: ConfigFile | None
) -> tuple[Resolved, list[str]]:
    """The values of the config file, overridden by all flags; and warnings about the file."""
    resolved = resolve(context, session, file, _flags(arguments), job_only=bool(arguments.command))
    if arguments.after is not None:  # only a flag, no config key: --after names a run
        resolved = replace(resolved, origins={**resolved.origins, "job.after": Origin("--after", is_flag=True)})
    if file is None:
        return resolved, []
    if arguments.config is not None:
        return resolved, [*file.warnings]
    from llmctl.submit.config_file import found_config_warnings

    return resolved, found_config_warnings(context, file, resolved.below_flags)


def _spec(arguments: SubmitArguments, resolved: Resolved, section: "JobConfig", default_name: str) -> JobSpec:
    more = {"after": arguments.after, "command": arguments.command, "torchrun": arguments.torchrun}
    return job_spec(resolved, section, default_name, **more)


def unnamed_example(plan: SubmitPlan, context: Context, arguments: SubmitArguments) -> str:
    """Place and cost of the bundled example, if nobody has named it and a queue, which may bill, would get it."""
    named = arguments.config is not None or arguments.example or arguments.hf is not None or bool(arguments.command)
    if named or arguments.dry_run or plan.job.queue is None:
        return ""
    from llmctl.submit.config_file import found_config

    return "" if found_config(context) is not None else f"{plan.job.profile.name}: {plan.job.cost}"


def example_not_named(job: str) -> UsageError:
    """The refusal of an example that nobody has named, and about which nobody can be asked."""
    return UsageError(
        f"CONFIG: none is given, and the bundled example would go to {job}; name a config, or give --example"
    )


def notes_beforehand(plan: SubmitPlan, context: Context, *, has_page: bool) -> list[str]:
    """Site message, warnings and cost, to be told before the job is submitted.

    Args:
        plan: of the submission.
        context: folders of the user.
        has_page: True if a page of the plan, which has the cost, is shown too.
    """
    profile, lines = plan.job.profile, [*plan.warnings]
    if profile.notice:
        from llmctl.submit.preview.site_message import unseen_site_message

        notice = unseen_site_message(profile, context.folders)
        lines = [*([f"{profile.name}: {notice}"] if notice else []), *lines]
    if plan.job.cost is not None and not has_page:
        lines.append(f"asks for {plan.job.cost}")
    return lines


def _check_arguments(arguments: SubmitArguments) -> None:
    """Refuse a Python program as config, and arguments that exclude each other.

    Raises:
        UsageError: names them.
    """
    if isinstance(arguments.config, str) and arguments.config.endswith(".py"):
        from llmctl.site.torchrun import python_script_problem

        raise UsageError(python_script_problem(arguments.config))
    taken = arguments.config is not None or arguments.hf is not None or arguments.data or arguments.command
    if arguments.example and taken:
        raise UsageError("--example: takes the place of CONFIG, --hf, --data and COMMAND; leave it or them out")
    if arguments.torchrun:
        from llmctl.site.torchrun import torchrun_words

        torchrun_words(arguments.command, "")  # refuses another form


def _with_unset_values(
    context: Context, session: ClusterSession, spec: JobSpec, *, dry_run: bool
) -> tuple[ClusterSession, list[str]]:
    """The session with a folder for the runs and, for a dry run, placeholders for what is not set; and notes."""
    before = session.profile
    if dry_run:
        from llmctl.site.unset_values import with_placeholders

        on_hosts, is_remote = session.backend is None, session.transport.is_remote
        profile = with_placeholders(before, spec, starts_on_hosts=on_hosts and is_remote, is_remote=is_remote)
        session = replace(session, profile=profile)
    if before.runs_root is not None:
        return session, []
    from llmctl.site.unset_values import runs_root_note

    group = spec.group or session.profile.group
    session = session.with_runs_root(context, group)
    return session, [runs_root_note(session.profile, group)]


def _placeholder_notes(profile: "ClusterProfile", shown: str) -> list[str]:
    from llmctl.site.unset_values import placeholder_note

    note = placeholder_note(profile.name, shown)
    return [note] if note else []


def _read_config(context: Context, arguments: SubmitArguments) -> ConfigFile | None:
    """The config file, which a COMMAND and --hf do without."""
    _check_arguments(arguments)
    if arguments.hf is not None or arguments.data:
        from llmctl.submit.continued import continued_problem

        if problem := continued_problem(arguments.hf, arguments.data):
            raise UsageError(problem)
        if arguments.command or arguments.script_arguments:
            raise UsageError("--hf: takes the place of CONFIG, COMMAND and --arg; leave them out, or leave out --hf")
        return None
    if arguments.command and arguments.config is None:
        if arguments.script_arguments:
            raise UsageError("--arg: goes with a training script, and a COMMAND has none")
        return None
    from llmctl.submit.config_file import read_config

    return read_config(context, arguments)


def _from_start(
    context: Context, session: ClusterSession, arguments: SubmitArguments, resolved: Resolved
) -> tuple[Resolved, list[str]]:
    """The values with the model of the folder that the run starts from, and with what --hf decides; and notes."""
    from trainer.planning.build_config import names_start

    notes: list[str] = []
    if names_start(resolved.values):
        from llmctl.submit.start_model import with_start_model

        mounts = session.profile.container.mounts
        resolved, notes = with_start_model(resolved, session.transport, mounts, dry_run=arguments.dry_run)
    if arguments.hf is None:
        return resolved, notes
    from llmctl.submit.continued import with_lengths
    from llmctl.submit.visible_gpus import visible_gpus

    backend = session.backend or context.backend(session.profile)
    in_place = backend.capabilities.starts_in_place
    training = resolved.values.get("training")
    on_cpu = isinstance(training, Mapping) and training.get("device") == "cpu"
    has_gpus = not on_cpu and (bool(visible_gpus(context)) if in_place else True)
    resolved, more = with_lengths(resolved, session.transport, has_gpus=has_gpus)
    return resolved, [*notes, *more]


def _default_name(arguments: SubmitArguments, file: ConfigFile | None) -> str:
    if arguments.torchrun:
        from llmctl.site.torchrun import torchrun_words

        return _as_name(torchrun_words(arguments.command, "").name)
    if arguments.command:
        return _as_name(Path(arguments.command[0]).name)
    if arguments.hf is not None:
        return _as_name(Path(arguments.hf).name)
    return _as_name(file.path.stem if file is not None and not file.source else "run")


def _new_run(run_dir: str, run_id: str) -> PathCheck:
    """Check that no run has this --run-id."""

    def judge(facts: Mapping[str, PathFacts]) -> Problem | None:
        if not facts[run_dir].kind:
            return None
        return Problem(
            f"--run-id {run_id}", f"{run_dir} exists already; give another run id, or leave the flag out", of="flag"
        )

    return PathCheck((run_dir,), judge)


def _first_record(
    context: Context,
    job: Job,
    resolved: Resolved,
    user_code: "UserCode | None",
    template: Mapping[str, str] | None,
) -> RunRecord:
    """The record of a new run, before its first submission."""
    origins = {key: origin.text for key, origin in sorted(resolved.origins.items())}
    return RunRecord(
        run_id=job.run_id,
        name=job.spec.name,
        created=time.time(),
        llmctl_version=__version__,
        cluster=job.profile.name,
        run_dir=job.run_dir,
        command=context.argv,
        job=job.spec.as_plain(),
        config=None if job.config is None else job.config.model_dump(mode="json"),
        origins=origins,
        code={
            "trainer": None,
            "commit": user_code.commit if user_code else None,
            "diff": user_code.diff if user_code else None,
        },
        cwd=None if job.is_remote else str(context.cwd),
        template=template,
    )


def _flags(arguments: SubmitArguments) -> list[Flag]:
    of_job = _job_flags(arguments.job)
    flags = [*parse_settings(arguments.settings), *of_job, *arguments.flags]
    if arguments.hf is not None:
        from llmctl.submit.continued import continued_flags

        flags = [*continued_flags(arguments.hf, arguments.data), *flags]
    for entry in arguments.env:
        name, equals, value = entry.partition("=")
        if not equals or not name:
            raise UsageError(f"--env {entry}: give NAME=VALUE, or --secret NAME for a value that must stay hidden")
        flags.append(Flag("--env", f"job.env.{name}", value))
    if arguments.secrets:
        flags.append(Flag("--secret", "job.secrets", list(arguments.secrets), adds=True))
    return flags


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

"""Execution of a plan: the run directory, the index, the job, in this order.

The order of the acts is what makes a kill at any instant harmless: the run directory is complete and in the index
before the job is started, and job.sh itself writes down who runs it (started.json).
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from llmctl.backends.base import SubmittedJob
from llmctl.context import Context, secrets_bytes
from llmctl.errors import LlmctlError, RecordError, SchedulerError
from llmctl.runs.record import RunIndex, RunRecord, Submission
from llmctl.submit.checks import runs_root_problem
from llmctl.submit.environment_checks import check_container_runtime, check_torch
from llmctl.submit.node_python import warn_of_node_python
from llmctl.submit.origins import profile_error
from llmctl.submit.plan import Plan
from llmctl.submit.request import JobPlan
from llmctl.submit.start import QueueSubmission, SubmissionLost, start_here
from llmctl.transport.file_writes import FileWrite
from llmctl.transport.protocol import Transport, transport_for

if TYPE_CHECKING:
    from llmctl.transport.host_group import HostGroup

Tell = Callable[[str], None]


def execute_plan(plan: Plan, context: Context, tell: Tell) -> RunRecord:
    """Carry out a plan: write the run directory and index entry, start the job.

    Args:
        plan: of the submission.
        context: of this call.
        tell: says on standard error what was found and what is being waited for.

    Raises:
        ProfileError: the job's Python has no torch, or the run directory cannot be made or written.
        RecordError: the run is there already, or its record or index entry cannot be written.
        SubmissionLost: nobody can tell whether the job was accepted; the run stays as it is.
        SchedulerError: the job was not accepted; a new run leaves nothing behind.
    """
    job = plan.job
    transport, index = context.connect(job.profile), context.index
    if job.is_remote:
        transport = transport_for(transport, job.spec.nodes)
    _check_software(job, context, transport, tell)
    submission = Submission(plan.number, transport.now())
    before = None if plan.is_new else RunRecord.load(plan.record.run_dir, transport)
    undo = partial(_undo, plan, index, transport, before)
    try:
        files = _files(plan, context)
        if plan.is_new:
            _make_run_dir(str(plan.record.run_dir), transport)
        try:  # whatever cuts this off, a Ctrl-C too, nothing of it is left
            record = _write(plan, submission, files, transport)
            index.add(record)
        except BaseException:
            undo()
            raise
        try:
            jobs = _start(plan, context, transport, tell)
        except SubmissionLost:
            raise
        except (LlmctlError, OSError):
            undo()
            raise
        except KeyboardInterrupt:  # perhaps after the start: what runs keeps its directory
            name = record.run_id
            tell(f"{name} may have been submitted all the same: llmctl status {name}; llmctl cancel {name} ends it")
            raise
    except OSError as error:
        problem = ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)
        raise profile_error(context, job.profile, [runs_root_problem(job.profile, context.folders, problem)]) from None
    record = record.with_submission(replace(submission, jobs=jobs))
    index.add(record)  # first, since it is here: a connection may be lost before the record is written
    _save(record, transport)
    return record


def _save(record: RunRecord, transport: Transport) -> None:
    """Note the jobs; over a new connection if the old one was lost."""
    try:
        record.save(transport)
    except SchedulerError:
        try:
            record.save(transport)
        except LlmctlError as error:
            jobs = ", ".join(job.job_id for job in record.submissions[-1].jobs)
            raise RecordError(
                f"{record.run_id} was submitted as job {jobs}, but its record could not be written: {error.message}\n"
                f"nothing is lost: llmctl status {record.run_id} finds the job by its name"
            ) from None


def _check_software(job: JobPlan, context: Context, transport: Transport, tell: Tell) -> None:
    # Here and not in the plan: a job can be looked at where it cannot be run.
    in_container = job.request.container is not None
    if in_container:
        warning = check_container_runtime(job.profile, context, transport, job.request)
        if warning:
            tell(warning)
    is_command = bool(job.spec.command)
    warning = warn_of_node_python(job.profile, transport, is_command=is_command, in_container=in_container)
    if warning:
        tell(warning)
    if job.config is None or in_container:
        return
    found = check_torch(job.profile, context, transport, job.layout.python, job.request)
    if found is not None:
        tell(f"{transport.host}: {found}")


def _make_run_dir(run_dir: str, transport: Transport) -> None:
    try:
        transport.make_folder(run_dir, mode=0o700, exclusive=True)
    except FileExistsError:
        raise RecordError(f"{run_dir} is there already; submit again for another run id") from None


def _write(plan: Plan, submission: Submission, files: Sequence[FileWrite], transport: Transport) -> RunRecord:
    """Fill the run directory.

    The record comes last: it makes the directory a run.
    """
    record = plan.record
    from llmctl.submit.snapshot import link_supervisor, send_code

    if plan.is_new:
        address = send_code(record.run_dir, plan.user_code, transport, with_trainer=not plan.installed)
        record = replace(record, code={**record.code, "trainer": address})
    link_supervisor(record.run_dir, transport)
    for folder in plan.job.new_folders:
        transport.make_folder(folder)
    record = record.with_submission(submission)
    transport.write_files([*files, FileWrite(f"{record.run_dir}/run.json", record.as_json())])
    return record


def _files(plan: Plan, context: Context) -> list[FileWrite]:
    """Config, secrets and script of a submission."""
    record, files = plan.record, []
    if record.config is not None:
        import yaml

        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        text = yaml.dump(dict(record.config), Dumper=dumper, sort_keys=False)
        files.append(FileWrite(f"{record.run_dir}/config.yaml", text.encode()))
    secrets = plan.job.layout.secrets_file
    if secrets is not None:
        files.append(FileWrite(str(secrets), secrets_bytes(plan.job.spec.secrets, context.environment)))
    script = plan.rendered.script.encode("utf-8", "surrogateescape")
    files.append(FileWrite(f"{record.run_dir}/job.json", plan.rendered.settings.encode()))
    return [*files, FileWrite(str(plan.rendered.path), script, 0o700)]


def _start(plan: Plan, context: Context, transport: Transport, tell: Tell) -> tuple[SubmittedJob, ...]:
    run_dir = str(plan.record.run_dir)
    if plan.job.backend.capabilities.starts_on_hosts:
        from llmctl.submit.start_ssh import address_of_second, start_on_group

        peer = address_of_second(plan.job.profile, plan.job.request, context.environment)
        in_container = plan.job.request.container is not None
        group = cast("HostGroup", transport)
        return start_on_group(plan.rendered.commands, run_dir, plan.number, group, in_container=in_container, peer=peer)
    backend = plan.job.queue
    if backend is None:
        return start_here(plan.rendered.commands, run_dir, transport)
    known = {job.job_id for submission in plan.record.submissions for job in submission.jobs}
    queue = QueueSubmission(plan.record.run_id, run_dir, backend, transport, known, tell)
    return tuple(queue.submit(command) for command in plan.rendered.commands)


def _undo(plan: Plan, index: RunIndex, transport: Transport, before: RunRecord | None) -> None:
    """Remove all traces of a submission that started nothing.

    A run that was there gets its record back.
    """
    with suppress(OSError, LlmctlError):
        if before is None:
            index.remove(plan.record.run_id)
        else:
            index.add(before)
        made = [plan.job.layout.secrets_file, plan.record.run_dir if before is None else None]
        transport.remove([str(path) for path in made if path is not None])
        if before is not None:
            before.save(transport)

"""Execution of a plan: the run directory, the index, the job, in this order.

The order makes a kill at any instant harmless: the run directory is complete and in the index before the job is
started, and job.sh itself records its process or job id (started.json).

A scheduler's answer can be lost after the scheduler has accepted the job: the connection drops, the command exceeds
its time limit, or the command prints no id. Then the queue is searched for the job's name, which holds the run id. A
job is submitted again only if the scheduler's answer proves that the job was not accepted.
"""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from llmctl.backends.base import HostCommand, QueueBackend, SubmittedJob
from llmctl.context import Context, secrets_bytes
from llmctl.errors import LlmctlError, ProgramMissing, RecordError, SchedulerError, SubmissionLost
from llmctl.runs.attempts import attempt_numbers
from llmctl.runs.index import RunIndex
from llmctl.runs.record import PredictedStep, RunRecord, Submission
from llmctl.runs.scheduler_query import RetryPolicy, absent_command, find_job, is_absent, last_line
from llmctl.submit.checks.site import runs_root_problem
from llmctl.submit.checks.torch_check import NeededPackage, check_torch
from llmctl.submit.container_runtime import check_container_runtime
from llmctl.submit.job import Job, SubmitPlan
from llmctl.submit.origins import profile_error
from llmctl.transport.file_writes import FileWrite
from llmctl.transport.protocol import CommandResult, Transport, program_of, transport_for

if TYPE_CHECKING:
    from llmctl.transport.host_group import HostGroup

SUBMIT_TIMEOUT_S = 120.0
"""Above the minute for which Slurm's clients try to reach a controller, and above a site's submit filter."""
SEARCH_PAUSES_S = (1.0, 3.0, 8.0, 20.0)
"""Before each search for a job whose answer was lost: a slow scheduler may accept it long after its client has left."""
RETRY_PAUSES_S = (2.0, 5.0, 15.0)
"""Before each retry of a submission that the scheduler could not accept."""
FIND_NODE_PYTHON = (
    "for python in python3 /usr/libexec/platform-python; do "
    '"$python" -c "import sys; sys.exit(sys.version_info < (3, 6))" 2>/dev/null && exec "$python" --version; '
    "done; exit 1"
)
"""Shell line: prints the version of the python3 that job.sh would use (see templates/_supervisor.sh.j2)."""
NODE_PYTHON_REMEDY = "ask the site for a python3 of version 3.6 or later on its nodes"
"""Remedy where nodes have no python3."""
_FIND_TIMEOUT_S = 60.0


def execute_plan(plan: SubmitPlan, context: Context) -> RunRecord:
    """Carry out a plan whose notes were told: write the run directory and index entry, start the job.

    Args:
        plan: of the submission.
        context: of this call; findings and waits are told to the user.

    Raises:
        ProfileError: the job's Python has no torch, or the run directory cannot be made or written.
        RecordError: the run exists, or its record or index entry cannot be written.
        SubmissionLost: the scheduler may or may not have accepted the job; the run stays as it is.
        SchedulerError: the job was not accepted; a new run leaves nothing behind.
    """
    job = plan.job
    if job.profile.notice:
        from llmctl.submit.preview.site_message import remember_site_message

        with suppress(OSError):  # on failure, the message appears again next time
            remember_site_message(job.profile, context.folders)
    transport, index = context.connect(job.profile), context.index
    if job.is_remote:
        transport = transport_for(transport, job.request.hosts)
    _check_software(job, context, transport)
    predicted = None if job.config is None else _predicted(job, context, transport)
    submission = Submission(plan.job.submission, transport.now(), hosts=job.request.hosts, predicted=predicted)
    before = None if plan.is_new else RunRecord.load(plan.record.run_dir, transport)
    undo = partial(_undo, plan, index, transport, before)
    try:
        files = _files(plan, context)
        own, note = transport.make_own_folder(str(plan.record.run_dir.parent))
        if note:
            context.tell(note)
        if plan.is_new:
            _make_run_dir(str(plan.record.run_dir), transport)
        try:  # any interruption, Ctrl-C included, leaves nothing behind
            record = _write(plan, submission, files, transport, own)
            index.add(record)
        except BaseException:
            undo()
            raise
        try:
            jobs = _start(plan, context, transport)
        except SubmissionLost:
            raise
        except (LlmctlError, OSError):
            undo()
            raise
        except KeyboardInterrupt:  # perhaps after the start: a running job keeps its directory
            name = record.run_id
            context.tell(
                f"{name} may have been submitted before the interrupt: llmctl status {name}; llmctl cancel {name}"
            )
            raise
    except OSError as error:
        problem = ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)
        raise profile_error(context, job.profile, [runs_root_problem(job.profile, context.folders, problem)]) from None
    record = record.with_submission(replace(record.submissions[-1], jobs=jobs))
    index.add(record)  # before the record: the index is local, while the connection to the record may be lost
    _save(record, transport)
    return record


def _save(record: RunRecord, transport: Transport) -> None:
    """Record the jobs; over a new connection if the old connection was lost."""
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


def _check_software(job: Job, context: Context, transport: Transport) -> None:
    # Not in the plan: --dry-run works where the job cannot run.
    in_container = job.request.container is not None
    if in_container:
        warning = check_container_runtime(job.profile, context, transport, job.request)
        if warning:
            context.tell(warning)
    warning = _node_python_warning(job, transport)
    if warning:
        context.tell(warning)
    if job.config is None or in_container:
        return
    # Named by its ending alone: if the package is missing for another name, the trainer says so.
    is_gguf = (job.config.checkpoint.load or "").endswith(".gguf")
    packages = [NeededPackage("gguf", "gguf", "checkpoint.load")] if is_gguf else []
    for key, module, package in job.config.logging.tracker_packages():
        packages.append(NeededPackage(module, package, key, is_optional=True))
    found = check_torch(job.profile, context, transport, job.python, job.request, packages=packages)
    if found is not None:
        context.tell(f"{transport.host}: {found}")


def _node_python_warning(job: Job, transport: Transport) -> str:
    """A sentence if a job may find no Python for its supervisor; else empty.

    A training job without a container has the Python of its environment, and a container hides its Python from the
    supervisor outside.

    Raises:
        SchedulerError: the machine does not answer.
    """
    software, in_container = job.profile.environment, job.request.container is not None
    has_environment = software.kind in ("venv", "conda") or software.python is not None
    if job.backend.capabilities.starts_in_place or not (job.spec.command or in_container):
        return ""
    if has_environment and not in_container:
        return ""
    if transport.run(["sh", "-c", FIND_NODE_PYTHON], timeout_s=_FIND_TIMEOUT_S, only_reads=True).exit_status == 0:
        return ""
    return (
        f"{transport.host} has no python3 of version 3.6 or later, which starts the ranks; if the nodes have none: "
        f"{NODE_PYTHON_REMEDY}"
    )


def _make_run_dir(run_dir: str, transport: Transport) -> None:
    try:
        transport.make_folder(run_dir, mode=0o700, exclusive=True)
    except FileExistsError:
        raise RecordError(f"{run_dir} exists already; submit again for another run id") from None


def _write(
    plan: SubmitPlan, submission: Submission, files: Sequence[FileWrite], transport: Transport, own: str
) -> RunRecord:
    """Fill the run directory.

    The record comes last: it makes the directory a run.
    """
    record = plan.record
    from llmctl.submit.snapshot import contents_of, link_supervisor, send_code, sent_before

    if plan.is_new:
        folders, with_trainer = plan.job.folders, not plan.installed
        sent = send_code(record.run_dir, plan.user_code, transport, own, folders, with_trainer=with_trainer)
        record, code = replace(record, code={**record.code, "trainer": sent.trainer}), sent.checksums
    else:
        code = sent_before(record, transport) | link_supervisor(record.run_dir, transport, own, plan.job.folders)
    for folder in plan.job.new_folders:
        transport.make_folder(folder)
    sums, digest = contents_of(record.run_dir, submission.number, code, files)
    record = record.with_submission(replace(submission, contents=digest))
    transport.write_files([*files, sums, FileWrite(f"{record.run_dir}/run.json", record.as_json())])
    return record


def _predicted(job: Job, context: Context, transport: Transport) -> PredictedStep | None:
    from llmctl.submit.preview.estimate import predicted_step

    return predicted_step(job, context.transport, transport, context.folders)


def _files(plan: SubmitPlan, context: Context) -> list[FileWrite]:
    """Config, secrets, script and further files of a submission."""
    record = plan.record
    files = [FileWrite(f"{record.run_dir}/{name}", content) for name, content in plan.files.items()]
    if record.config is not None:
        import yaml

        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        text = yaml.dump(dict(record.config), Dumper=dumper, sort_keys=False)
        files.append(FileWrite(f"{record.run_dir}/config.yaml", text.encode()))
    secrets = plan.job.secrets_file
    if secrets is not None:
        files.append(FileWrite(str(secrets), secrets_bytes(plan.job.spec.secrets, context.environment)))
    script = plan.rendered.script.encode("utf-8", "surrogateescape")
    files.append(FileWrite(f"{record.run_dir}/job.json", plan.rendered.settings.encode()))
    return [*files, FileWrite(str(plan.rendered.path), script, 0o700)]


def _start(plan: SubmitPlan, context: Context, transport: Transport) -> tuple[SubmittedJob, ...]:
    run_dir = str(plan.record.run_dir)
    if plan.job.backend.capabilities.starts_on_hosts:
        from llmctl.submit.start_ssh import address_of_second, start_on_group

        peer = address_of_second(plan.job.request, context.environment)
        in_container = plan.job.request.container is not None
        group = cast("HostGroup", transport)
        # A submission may have made several attempts.
        attempt = 1 if plan.is_new else max(attempt_numbers(plan.record, transport), default=0) + 1
        return start_on_group(plan.rendered.commands, run_dir, attempt, group, in_container=in_container, peer=peer)
    backend = plan.job.queue
    if backend is None:
        return start_here(plan.rendered.commands, run_dir, transport)
    known = {job.job_id for submission in plan.record.submissions for job in submission.jobs}
    queue = QueueSubmission(plan.record.run_id, run_dir, backend, transport, known, context.tell)
    return tuple(queue.submit(command) for command in plan.rendered.commands)


def _undo(plan: SubmitPlan, index: RunIndex, transport: Transport, before: RunRecord | None) -> None:
    """Remove all traces of a submission that started nothing.

    A run that existed before gets its record back.
    """
    with suppress(OSError, LlmctlError):
        if before is None:
            index.remove(plan.record.run_id)
        else:
            index.add(before)
        made = [plan.job.secrets_file, plan.record.run_dir if before is None else None]
        transport.remove([str(path) for path in made if path is not None])
        if before is not None:
            before.save(transport)


@dataclass(frozen=True)
class QueueSubmission:
    """Submission of one job to a queue.

    Attributes:
        run_id: of the run, for messages.
        run_dir: working directory of the command.
        backend: of the scheduler.
        transport: the machine where the scheduler's commands run.
        known_ids: jobs of earlier submissions of the run, which have the same name.
        tell: prints the reason of a wait.
        sleep: waits.
    """

    run_id: str
    run_dir: str
    backend: QueueBackend
    transport: Transport
    known_ids: Collection[str]
    tell: Callable[[str], None]
    sleep: Callable[[float], None] = field(default=time.sleep)

    def submit(self, command: HostCommand) -> SubmittedJob:
        """Submit a job; returns the job that the scheduler accepted.

        Raises:
            SubmissionLost: the scheduler may or may not have accepted the job.
            SchedulerError: the scheduler refused the job; the message quotes the scheduler.
        """
        for pause_s in RETRY_PAUSES_S:
            job = self._try(command)
            if isinstance(job, SubmittedJob):
                return job
            self.tell(f"{program_of(command.argv)}: {last_line(job)}; trying again in {pause_s:g} s")
            self.sleep(pause_s)
        job = self._try(command)
        if isinstance(job, SubmittedJob):
            return job
        raise self._refusal(command, job)

    def _try(self, command: HostCommand) -> SubmittedJob | CommandResult:
        """The job; or the scheduler's answer if it proves that the job was not accepted and a retry may succeed."""
        try:
            result = self.transport.run(command.argv, timeout_s=SUBMIT_TIMEOUT_S, cwd=self.run_dir)
        except ProgramMissing:
            raise absent_command(command.argv, self.transport) from None
        except SchedulerError as error:
            if not error.transient:
                raise  # the command could not even be started
            return self._find(command, error.message)
        if result.exit_status == 0:
            try:
                return SubmittedJob(command.host, self.backend.parse_job_id(result.stdout))
            except SchedulerError as error:
                return self._find(command, error.message)
        if is_absent(result):
            raise absent_command(command.argv, self.transport)
        if not self.backend.is_transient(result.exit_status, result.stderr):
            raise self._refusal(command, result)
        if not self.backend.was_not_taken(result.exit_status, result.stderr):
            return self._find(command, last_line(result))
        return result

    def _find(self, command: HostCommand, why: str) -> SubmittedJob:
        """Search the queue for the name of a job whose answer was lost."""
        name = self.backend.job_name(self.run_id)
        self.tell(
            f"{program_of(command.argv)}: no job id came back: {why}\nsearching the queue for a job called {name}"
        )
        problem = ""
        for pause_s in SEARCH_PAUSES_S:
            self.sleep(pause_s)
            retries = RetryPolicy(sleep=self.sleep)
            report, answer = find_job(self.backend, name, self.transport, retries, known_ids=self.known_ids)
            if report is not None:
                self.tell(f"found it: job {report.job_id}")
                return SubmittedJob(command.host, report.job_id)
            problem = answer.problem or f"there is no job called {name}"
        raise SubmissionLost(
            f"{self.run_id}: unknown if it was submitted: {why}; then: {problem}\n"
            f"llmctl status {self.run_id} finds a submitted job; without one, llmctl resume {self.run_id} submits it",
            transient=True,
            argv=command.argv,
        )

    def _refusal(self, command: HostCommand, result: CommandResult) -> SchedulerError:
        lines = [line.strip() for line in (result.stderr or result.stdout).splitlines() if line.strip()]
        words = " ".join(lines)[-600:] or last_line(result)
        advice = self.backend.advice(result.stderr)
        return SchedulerError(
            f"not submitted: {program_of(command.argv)}: {words}" + (f"\n{advice}" if advice else ""),
            transient=self.backend.is_transient(result.exit_status, result.stderr),
            argv=command.argv,
            exit_status=result.exit_status,
            stderr_tail=result.stderr,
        )


def start_here(commands: Sequence[HostCommand], run_dir: str, transport: Transport) -> tuple[SubmittedJob, ...]:
    """Start job.sh on this machine, without a scheduler.

    Raises:
        SchedulerError: job.sh cannot be started.
    """
    started = []
    for command in commands:
        identity = transport.start_detached(command.argv, cwd=run_dir, log=f"{run_dir}/job.log")
        pid = identity.pid
        started.append(SubmittedJob(command.host, str(pid), pid, identity.start_time, identity.boot_id))
    return tuple(started)

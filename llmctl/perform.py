"""Carrying out a plan of submission: the run directory, the index, the job, in this order.

The order of the acts is what makes a kill at any instant harmless: the run directory is complete and in the index
before the job is started, and job.sh itself writes down who runs it (started.json).
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from llmctl.backends import load_queue_backend
from llmctl.backends.base import SubmittedJob
from llmctl.cluster_paths import runs_root_error
from llmctl.errors import LlmctlError, RecordError, SchedulerError
from llmctl.file_acts import FileWrite
from llmctl.hands import Hands, hands_for
from llmctl.invocation import Invocation
from llmctl.job_start import QueueSubmission, SubmissionLost, start_here
from llmctl.node_python import remark_on_node_python
from llmctl.run_record import RunRecord, Submission
from llmctl.secrets import secrets_bytes
from llmctl.software_probes import check_container_runtime, check_torch
from llmctl.submission import Plan

if TYPE_CHECKING:
    from llmctl.host_group import HostGroup

Tell = Callable[[str], None]


def perform(plan: Plan, invocation: Invocation, tell: Tell) -> RunRecord:
    """Carry out a plan: write the run directory, enter the run in the index, start the job, note its id.

    Args:
        plan: of the submission.
        invocation: of this call.
        tell: says on standard error what was found and what is being waited for.

    Raises:
        ProfileError: the job's Python has no torch, or the run directory cannot be made or written.
        RecordError: the run is there already, or its record or index entry cannot be written.
        SubmissionLost: nobody can tell whether the job was accepted; the run stays as it is.
        SchedulerError: the job was not accepted; a new run leaves nothing behind.
    """
    hands = hands_for(invocation.connect(plan.profile), plan.job.nodes)
    _check_software(plan, invocation, hands, tell)
    submission = Submission(plan.number, hands.now())
    before = None if plan.is_new else RunRecord.load(plan.record.run_dir, hands)
    try:
        record = _prepare(plan, invocation, hands, submission, before)
        try:
            jobs = _start(plan, invocation, hands, tell)
        except SubmissionLost:
            raise
        except (LlmctlError, OSError):
            _undo(plan, invocation, hands, before)
            raise
        except KeyboardInterrupt:  # perhaps after the start: what runs keeps its directory
            name = record.run_id
            tell(f"{name} may have been submitted all the same: llmctl status {name}; llmctl cancel {name} ends it")
            raise
    except OSError as error:
        problem = ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)
        raise runs_root_error(plan.profile, invocation, problem) from None
    record = record.with_submission(replace(submission, jobs=jobs))
    invocation.index.add(record)  # first, since it is here: a connection may be lost before the record is written
    _save(record, hands)
    return record


def _save(record: RunRecord, hands: Hands) -> None:
    """Note the jobs; over a new connection where the old one was lost at this moment."""
    try:
        record.save(hands)
    except SchedulerError:
        try:
            record.save(hands)
        except LlmctlError as error:
            jobs = ", ".join(job.job_id for job in record.submissions[-1].jobs)
            raise RecordError(
                f"{record.run_id} was submitted as job {jobs}, but its record could not be written: {error.message}\n"
                f"nothing is lost: llmctl status {record.run_id} finds the job by its name"
            ) from None


def _check_software(plan: Plan, invocation: Invocation, hands: Hands, tell: Tell) -> None:
    # Here and not in the plan: what would be run can be looked at where it cannot be run.
    in_container = plan.request.container is not None
    for remark in (
        check_container_runtime(plan.profile, invocation, hands, plan.request),
        remark_on_node_python(plan.profile, hands, is_command=bool(plan.job.command), in_container=in_container),
    ):
        if remark:
            tell(remark)
    if plan.record.config is None or plan.request.container is not None:
        return
    found = check_torch(plan.profile, invocation, hands, plan.placed.place.python, plan.request)
    if found is not None:
        tell(f"{hands.host}: {found}")


def _prepare(
    plan: Plan, invocation: Invocation, hands: Hands, submission: Submission, before: RunRecord | None
) -> RunRecord:
    """Everything but the start; whatever cuts it off, a Ctrl-C too, nothing of it is left."""
    if plan.is_new:
        try:
            hands.make_folder(str(plan.record.run_dir), mode=0o700, exclusive=True)
        except FileExistsError:
            raise RecordError(f"{plan.record.run_dir} is there already; submit again for another run id") from None
    from llmctl.snapshot import link_supervisor

    try:
        record = (_send_code(plan, hands) if plan.is_new else plan.record).with_submission(submission)
        link_supervisor(plan.record.run_dir, hands)
        for folder in plan.placed.folders:
            hands.make_folder(folder)
        hands.write_files(_files(plan, record, invocation))
        invocation.index.add(record)
    except BaseException:
        _undo(plan, invocation, hands, before)
        raise
    return record


def _send_code(plan: Plan, hands: Hands) -> RunRecord:
    """Put the code in its place; returns the record with its address."""
    from llmctl.snapshot import own_code_links, store_own_code

    record, run_dir = plan.record, plan.record.run_dir
    if plan.user_code is None:
        hands.make_folder(f"{run_dir}/code/user")
    else:
        hands.put_tree(f"{run_dir}/code/user", {name: path for path, name in plan.user_code.files})
    if plan.installed:
        return record
    address, _ = store_own_code(run_dir.parent, hands)
    hands.link(own_code_links(run_dir, address))
    return replace(record, code={**record.code, "trainer": address})


def _files(plan: Plan, record: RunRecord, invocation: Invocation) -> list[FileWrite]:
    """All that is written at once; the record last, which makes a directory a run."""
    run_dir, files = record.run_dir, []
    if record.config is not None:
        import yaml

        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        text = yaml.dump(dict(record.config), Dumper=dumper, sort_keys=False)
        files.append(FileWrite(f"{run_dir}/config.yaml", text.encode()))
    secrets = plan.placed.place.secrets_file
    if secrets is not None:
        files.append(FileWrite(str(secrets), secrets_bytes(plan.job.secrets, invocation.environment)))
    script = plan.rendered.script.encode("utf-8", "surrogateescape")
    files.append(FileWrite(str(plan.rendered.path), script, 0o700))
    files.append(FileWrite(f"{run_dir}/job.json", plan.rendered.settings.encode()))
    return [*files, FileWrite(f"{run_dir}/run.json", record.as_json())]


def _start(plan: Plan, invocation: Invocation, hands: Hands, tell: Tell) -> tuple[SubmittedJob, ...]:
    run_dir = str(plan.record.run_dir)
    if plan.profile.scheduler == "ssh":
        from llmctl.ssh_start import address_of_second, start_on_group

        peer = address_of_second(plan.profile, plan.request, invocation.environment)
        in_container = plan.request.container is not None
        group = cast("HostGroup", hands)
        return start_on_group(plan.rendered.commands, run_dir, plan.number, group, in_container=in_container, peer=peer)
    backend = load_queue_backend(plan.profile.scheduler)
    if backend is None:
        return start_here(plan.rendered.commands, run_dir, hands)
    known = {job.job_id for submission in plan.record.submissions for job in submission.jobs}
    queue = QueueSubmission(plan.record.run_id, run_dir, backend, hands, known, tell)
    return tuple(queue.submit(command) for command in plan.rendered.commands)


def _undo(plan: Plan, invocation: Invocation, hands: Hands, before: RunRecord | None) -> None:
    """Nothing was started: leave nothing of it behind. A run that was there gets its record back."""
    with suppress(OSError, LlmctlError):
        if before is None:
            invocation.index.remove(plan.record.run_id)
        else:
            invocation.index.add(before)
        made = [plan.placed.place.secrets_file, plan.record.run_dir if before is None else None]
        hands.remove([str(path) for path in made if path is not None])
        if before is not None:
            before.save(hands)

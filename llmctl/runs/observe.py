"""Gather the facts about one cluster's runs in a fixed number of round trips.

The order matters because job.sh writes exit.json as its last act. The files are read first, and endings in the files
are final. The jobs of the remaining runs are then queried in one call. For a job that is gone, exit.json is read again,
because job.sh may have written exit.json in between; if it has submitted the next job of a chain, the queue is asked
about that job too. The accounting is queried last.
"""

from collections.abc import Sequence
from dataclasses import replace

from llmctl.errors import SchedulerError
from llmctl.job_state import JobState
from llmctl.runs.attempts import AttemptBeginning, DetailsMemory, RunAttempts, find_attempts, read_details
from llmctl.runs.facts import AttemptFacts, Started
from llmctl.runs.job_status import JobQuestion, SchedulerWatch, question_of
from llmctl.runs.links import WaitingJob
from llmctl.runs.metrics import table_of_tail, tail_of
from llmctl.runs.record import RunRecord
from llmctl.runs.state import JobAnswer, RunFacts
from llmctl.runs.view import RunView, build_view
from llmctl.transport.file_reads import FilePart, FileRead
from llmctl.transport.host_group import HostGroup
from llmctl.transport.processes import ProcessIdentity, ProcessReport
from llmctl.transport.protocol import Transport, transport_for

_TAIL = 4096
"""Bytes of job.log searched for its last line."""


def observe_runs(
    records: Sequence[RunRecord],
    transport: Transport,
    scheduler: SchedulerWatch | None = None,
    memory: DetailsMemory | None = None,
) -> list[RunView]:
    """The views of runs of one cluster, in order.

    Args:
        records: the runs' records.
        transport: the machine of their directories.
        scheduler: the cluster's scheduler; None where jobs are processes.
        memory: cache for repeated observation.
    """
    return [view for view, _ in observe_with_facts(records, transport, scheduler, memory)]


def observe_with_facts(
    records: Sequence[RunRecord],
    transport: Transport,
    scheduler: SchedulerWatch | None = None,
    memory: DetailsMemory | None = None,
) -> list[tuple[RunView, RunFacts]]:
    """The views of runs as ``observe_runs``, each with the facts that it was decided from."""
    tails = [tail_of(f"{record.run_dir}/metrics.jsonl") for record in records]
    found = []
    for record, facts, tail in zip(records, *_gather(records, transport, scheduler, tails, memory), strict=True):
        metrics = table_of_tail(tail)
        view = build_view(record, replace(facts, iteration_time_s=metrics.iteration_time_s()), metrics)
        found.append((view, facts))
    return found


def observe_run(
    record: RunRecord,
    transport: Transport,
    scheduler: SchedulerWatch | None = None,
    memory: DetailsMemory | None = None,
) -> RunView:
    """The view of one run."""
    return observe_runs([record], transport, scheduler, memory)[0]


def leaders_of(record: RunRecord, beginning: AttemptBeginning | None) -> list[ProcessIdentity]:
    """job.sh of the last submission. Read from started.json if submit was cut off before recording."""
    return [leader for _, leader in _hosts_and_leaders(record, beginning)]


def hosts_of(record: RunRecord) -> tuple[str, ...]:
    """Machines of the last submission, the head first; empty if a scheduler chose them, or in an old record."""
    return record.submissions[-1].hosts if record.submissions else ()


def is_elsewhere(beginning: AttemptBeginning | None, leaders: Sequence[ProcessIdentity], transport: Transport) -> bool:
    """True if a run was started on another machine, with processes invisible here.

    A living job.sh on this machine decides: the machine's name may have changed since.
    """
    report = transport.inspect_processes(leaders)
    return beginning is not None and not any(report.alive) and _is_other_host(beginning.started, report)


def _gather(
    records: Sequence[RunRecord],
    transport: Transport,
    scheduler: SchedulerWatch | None,
    further: Sequence[FileRead],
    memory: DetailsMemory | None = None,
) -> tuple[list[RunFacts], list[FilePart | None]]:
    attempts = find_attempts(records, transport)
    jobs: dict[int, JobAnswer | None] = {}
    open_ones = [index for index in range(len(records)) if not _has_ended(records[index], attempts[index], scheduler)]
    questions: dict[int, JobQuestion] = {}
    if scheduler is not None:
        questions = {index: question_of(records[index], attempts[index], scheduler.backend) for index in open_ones}
        jobs.update(zip(questions, scheduler.ask_queue([*questions.values()]), strict=True))
    else:
        jobs.update(_ask_processes({index: (records[index], attempts[index].newest) for index in open_ones}, transport))
    gone = [index for index in open_ones if _is_gone(jobs[index])]
    if gone:
        # Listing a folder makes a network file system drop its cached "no such file".
        folders = [str(one.directory) for index in gone if (one := attempts[index].newest) is not None]
        if folders:
            transport.list_names(folders)
        for index, again in zip(gone, find_attempts([records[index] for index in gone], transport), strict=True):
            attempts[index] = again
        if scheduler is not None:
            jobs.update(_ask_about_next_jobs(scheduler, gone, records, attempts, questions))
            gone = [index for index in gone if _is_gone(jobs[index])]
    details, parts = read_details([one.newest for one in attempts], further, transport, memory)
    left = [
        index
        for index in gone
        if details[index] is None or attempts[index].waiting is not None or _ending_missing(details[index])
    ]
    if scheduler is not None:
        _ask_accounting(
            scheduler, [index for index in left if _has_left(jobs[index])], records, attempts, details, jobs
        )
    else:
        for index in left:
            jobs[index] = _with_survivors(jobs[index], records[index], attempts[index].newest, transport)
    now = transport.now() if records else 0.0
    facts = [
        _facts(record, attempts[index], details[index], jobs.get(index), now, scheduler)
        for index, record in enumerate(records)
    ]
    return _with_last_words(facts, records, transport), parts


def _ask_about_next_jobs(
    scheduler: SchedulerWatch,
    gone: Sequence[int],
    records: Sequence[RunRecord],
    attempts: Sequence[RunAttempts],
    questions: dict[int, JobQuestion],
) -> dict[int, JobAnswer | None]:
    """Answers on all jobs, if a job of a chain has submitted the next one before it left the queue; else none."""
    again = {index: question_of(records[index], attempts[index], scheduler.backend) for index in gone}
    if all(question.job_ids == questions[index].job_ids for index, question in again.items()):
        return {}
    asked = {**questions, **again}
    return dict(zip(asked, scheduler.ask_queue([*asked.values()]), strict=True))


def _with_last_words(facts: list[RunFacts], records: Sequence[RunRecord], transport: Transport) -> list[RunFacts]:
    """Add job.log's last line for jobs without an attempt: often the only clue to the cause.

    job.log continues over submissions: a resumed run's last line may come from an earlier job.
    """
    silent = [
        index
        for index, one in enumerate(facts)
        if not one.attempts and one.job is not None and one.job.state.is_finished and one.job.source != "memory"
        if len(records[index].submissions) == 1
    ]
    reads = [FileRead(f"{records[index].run_dir}/job.log", offset=-_TAIL, limit=_TAIL) for index in silent]
    parts = transport.read_parts(reads) if reads else []
    for index, part in zip(silent, parts, strict=True):
        lines = part.data.decode(errors="replace").split("\n") if part is not None else []
        said = [" ".join(line.split()) for line in lines if line.strip()]
        facts[index] = replace(facts[index], last_words=said[-1][:300] if said else "")
    return facts


def _facts(
    record: RunRecord,
    attempts: RunAttempts,
    attempt: AttemptFacts | None,
    job: JobAnswer | None,
    now: float,
    scheduler: SchedulerWatch | None,
) -> RunFacts:
    link, waiting = attempts.waiting, None
    if link is not None and scheduler is not None:
        waiting = WaitingJob(link.number, link.job_id(scheduler.backend))
    last = record.submissions[-1] if record.submissions else None
    return RunFacts(
        run_id=record.run_id,
        job=job,
        submitted=last.time if last is not None else record.created,
        cancel_requested=last.cancel_requested if last is not None else None,
        attempt=attempt,
        now=now,
        attempts=attempts.count,
        attempts_of_submission=attempts.of_submission,
        waiting=waiting,
    )


def _has_ended(record: RunRecord, attempts: RunAttempts, scheduler: SchedulerWatch | None) -> bool:
    """True if exit.json is final. The job may begin again; a scheduler may restart a job that it stopped itself."""
    ending = attempts.newest.ending if attempts.newest is not None else None
    if ending is None or ending.restarts or ending.passes_on:
        return False
    was_cancelled = bool(record.submissions) and record.submissions[-1].cancel_requested is not None
    return scheduler is None or ending.is_final or was_cancelled


def _ending_missing(attempt: AttemptFacts | None) -> bool:
    return attempt is not None and (attempt.ending is None or attempt.ending.restarts)


def _is_gone(job: JobAnswer | None) -> bool:
    return job is not None and job.state not in (JobState.RUNNING, JobState.PENDING)


def _has_left(job: JobAnswer | None) -> bool:
    return job is not None and job.has_left


def _ask_accounting(
    scheduler: SchedulerWatch,
    indices: Sequence[int],
    records: Sequence[RunRecord],
    attempts: Sequence[RunAttempts],
    details: Sequence[AttemptFacts | None],
    jobs: dict[int, JobAnswer | None],
) -> None:
    asked = {index: question_of(records[index], attempts[index], scheduler.backend) for index in indices}
    asked = {index: question for index, question in asked.items() if question.job_ids}
    signs = [_last_sign_of_life(records[index], details[index]) for index in asked]
    jobs.update(zip(asked, scheduler.ask_accounting([*asked.values()], signs), strict=True))


def _last_sign_of_life(record: RunRecord, attempt: AttemptFacts | None) -> float:
    submitted = record.submissions[-1].time if record.submissions else record.created
    started = attempt.started.time if attempt is not None and attempt.started is not None else None
    newest = attempt.newest_heartbeat if attempt is not None else None
    return max(submitted, started or 0.0, newest.time if newest is not None else 0.0)


# The functions below are about jobs that are processes.


def _hosts_and_leaders(record: RunRecord, beginning: AttemptBeginning | None) -> list[tuple[str, ProcessIdentity]]:
    jobs = record.submissions[-1].jobs if record.submissions else ()
    recorded = [
        (job.host, ProcessIdentity(job.pid, job.pid_start_time, job.boot_id)) for job in jobs if job.pid is not None
    ]
    started = beginning.started if beginning is not None else None
    if recorded or started is None or started.pid is None:
        return recorded
    return [(started.host or "", ProcessIdentity(started.pid, started.pid_start_time, started.boot_id))]


def _ask_processes(
    runs: dict[int, tuple[RunRecord, AttemptBeginning | None]], transport: Transport
) -> dict[int, JobAnswer | None]:
    """Query job.sh of each run: one round trip per machine."""
    leaders = {index: _hosts_and_leaders(*run) for index, run in runs.items()}
    alive, reports = inspect_leaders([leader for group in leaders.values() for leader in group], transport)
    answers: dict[int, JobAnswer | None] = {}
    position = 0
    for index, group in leaders.items():
        span = slice(position, position + len(group))
        position += len(group)
        beginning = runs[index][1]
        started = beginning.started if beginning is not None else None
        answers[index] = _process_answer([leader for _, leader in group], alive[span], reports[span], started)
    return answers


def inspect_leaders(
    leaders: Sequence[tuple[str, ProcessIdentity]], transport: Transport
) -> tuple[list[bool | None], list[ProcessReport]]:
    """Liveness of these processes and a report of their machine; None for a machine out of reach.

    Args:
        leaders: (host, process).
        transport: one machine, searched for all processes, or a group of hosts.
    """
    group = transport if isinstance(transport, HostGroup) else None
    places = dict.fromkeys(host if group is not None else "" for host, _ in leaders)
    alive: list[bool | None] = [None] * len(leaders)
    reports = [ProcessReport("", None, ())] * len(leaders)
    for place in places:
        members = [index for index, (host, _) in enumerate(leaders) if group is None or host == place]
        one = group.transport_of(place) if group is not None else transport
        try:
            report = one.inspect_processes([leaders[index][1] for index in members])
        except SchedulerError as error:
            if group is None:
                raise
            report = ProcessReport(error.message, None, (None,) * len(members))
        for index, lives in zip(members, report.alive, strict=True):
            alive[index], reports[index] = lives, report
    return alive, reports


def _with_survivors(
    job: JobAnswer | None, record: RunRecord, beginning: AttemptBeginning | None, transport: Transport
) -> JobAnswer | None:
    if job is None or not job.state.is_finished:
        return job
    # Other hosts of the cluster may be down.
    transport = transport_for(transport, hosts_of(record))
    return replace(job, survivors=len(transport.processes_of_run(str(record.run_dir), leaders_of(record, beginning))))


def _process_answer(
    leaders: Sequence[ProcessIdentity],
    alive: Sequence[bool | None],
    reports: Sequence[ProcessReport],
    started: Started | None,
) -> JobAnswer | None:
    """The job of a cluster without a scheduler: its job.sh, as a process."""
    if not leaders:
        return None
    pids = ", ".join(str(leader.pid) for leader in leaders)
    if any(alive):
        return JobAnswer(JobState.RUNNING, f"pid {pids}")
    if len(leaders) == 1 and started is not None and _is_other_host(started, reports[0]):
        detail = f"started on {started.host}, but this machine is {reports[0].host}: run llmctl there"
        return JobAnswer(JobState.UNKNOWN, detail)
    if None in alive:
        blind = next((report for report in reports if report.boot_id is None), None)
        known = "the pid may have been reused" if blind is None else "its processes cannot be seen"
        # For a host out of reach, ``host`` holds the reason instead of a name.
        known += f": {blind.host}" if blind is not None and " " in blind.host else ""
        return JobAnswer(JobState.UNKNOWN, f"job.sh was pid {pids}; {known}")
    if any(leader.boot_id not in (None, report.boot_id) for leader, report in zip(leaders, reports, strict=True)):
        return JobAnswer(JobState.NODE_FAIL, "the machine was restarted")
    return JobAnswer(JobState.FAILED, f"job.sh (pid {pids}) was killed (SIGKILL, or out of memory)")


def _is_other_host(started: Started | None, report: ProcessReport) -> bool:
    if started is None or started.host is None:
        return False
    return started.host.partition(".")[0].lower() != report.host.partition(".")[0].lower()

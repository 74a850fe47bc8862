"""One job: its attempts, one after another, each with its end recorded."""

import argparse
import os
import sys
import time
from contextlib import suppress
from typing import Any, Dict, Mapping, Optional, Tuple

from . import processes
from .attempt import (
    Attempt,
    AttemptError,
    attempt_on_machine,
    claim_submission,
    new_attempt,
    read_secrets,
    remove_secrets,
    tell,
)
from .bad_nodes.record import note_end
from .cause import (
    cause_in_output,
    cause_of_failure,
    code_of_cause,
    code_of_first_part,
    failed_parts,
    launchers_error,
    text_since,
    unstarted_nodes,
)
from .chain.passing import Chain
from .copies import remove_copies
from .end_request import EndByFile, EndByLaunchLine, EndBySignal, EndByStep, EndRequest, left_of_slurm_job
from .ends import doubt_about_success
from .machines.following import Absence, await_next, find_absence, rendezvous_of_head
from .node import FLIGHT_FOLDER, attempt_variables, end_file_of
from .notices import Notices
from .peers import Peers
from .rendezvous import reserve_port
from .restarts import (
    HANG,
    NODE,
    UNSTARTED,
    Failure,
    class_of,
    culprits_of,
    read_history,
    read_rank_failures,
    read_reached,
    refusal,
    seconds_since_save,
)
from .settings import JobSettings
from .signals import Signals
from .spares.choice import shortage_of
from .spares.faults import fault_values, unstarted_again
from .trust import TrustError, check_submission
from .watch import AT_ONCE_S, Watch

_LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_")
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class Supervisor:
    """Supervisor of the attempts of one job on its head node, or on one of several machines."""

    def __init__(self, job: JobSettings, options: argparse.Namespace, environ: Mapping[str, str]) -> None:
        """Take over the signals of this process."""
        self._began = time.monotonic()
        self._signals = Signals()
        self._job = job
        self._options = options
        self._environ = dict(environ)
        if job.forgets_launchers:
            # llmctl itself may run in an allocation or below a launcher. The job on this machine belongs to neither.
            self._environ = {
                name: value for name, value in environ.items() if not name.startswith(_LAUNCHERS) and name not in _RANKS
            }
        self._node = int(options.words[0]) if options.words else 0
        self._log = f"{job.run_dir}/job.log"
        self._log_begin = 0
        self._notices: Optional[Notices] = None
        self._secrets: Optional[Dict[str, str]] = None
        self._earlier: Optional[Attempt] = None
        self._cause = ""
        self._link = 1
        self._chain: Optional[Chain] = None
        end = options.end_time
        self._end_time = float(end) if end.isdigit() else None
        if end == "ask":
            left_s = self._left_s()
            self._end_time = None if left_s is None else time.time() + left_s

    def run(self) -> int:
        """Create the attempt, run the launch line and record the end, again after a failure; returns the exit code.

        Raises:
            AttemptError: the attempt cannot be created, or another job owns the submission; or another user has made or
                may change what the job runs.
        """
        job, options = self._job, self._options
        if os.path.dirname(options.job) != job.run_dir:
            raise AttemptError(f"nothing is started: {options.job} is of another run, {job.run_id}")
        # Before the first write: an attempt that another user has tampered with leaves no trace of having begun.
        self._check_files()
        if not job.hosts:
            self._link = claim_submission(job, options.job_id)
        if job.chain is not None and not job.hosts:
            self._chain = Chain(job, job.chain, self._link, self._environ)
        while True:
            attempt = attempt_on_machine(job, self._node, self._number()) if job.hosts else new_attempt(job)
            if job.hosts and self._node > 0:
                _append_to(f"{attempt.folder}/node{attempt.suffix}.log")
            code, begins_again = self._attempt(attempt)
            if not begins_again:
                return code
            self._check_files()
            self._earlier = attempt

    def _number(self) -> int:
        """Number of the next attempt on several machines: llmctl gives the first one to all of them."""
        if self._earlier is not None:
            return self._earlier.number + 1
        return int(self._options.words[1]) if len(self._options.words) > 1 else self._job.submission

    def _check_files(self) -> None:
        """Check the owners, modes and contents of all that an attempt runs.

        Raises:
            AttemptError: names the file.
        """
        job = self._job
        try:
            check_submission(job.run_dir, job.submission)
        except TrustError as error:
            raise AttemptError(f"nothing of {job.run_id} is started: {error}") from None

    def _attempt(self, attempt: Attempt) -> Tuple[int, bool]:
        """Run one attempt to its end; returns its exit code, and True if another one follows in this job."""
        job = self._job
        self._log_begin = os.path.getsize(self._log) if os.path.exists(self._log) else 0
        attempt.write_started(job.submission, self._options.job_id, self._link)
        peers = Peers(job, attempt, self._node) if job.hosts and job.shared and job.nodes > 1 else None
        if self._node == 0 and job.notify:
            self._tell_begin(attempt)
        watch = Watch(
            job,
            attempt,
            self._signals,
            self._end_request(attempt),
            stop_after_s=self._stop_after_s(),
            left_s=self._left_s,
            peers=peers,
            notices=self._notices,
            is_head=self._node == 0,
            earlier=self._earlier,
        )
        code = 1  # of an end by an exception: never a success
        begins_again = False
        try:
            code = self._run_attempt(attempt, watch)
        except AttemptError as error:
            tell(str(error))
        finally:
            code, begins_again = self._leave(attempt, watch, code)
        return code, begins_again

    def _tell_begin(self, attempt: Attempt) -> None:
        """Tell the places of notices at once that the attempt has begun. The head node alone does."""
        if self._notices is None:
            secrets: Dict[str, str] = {}
            # The launch tells of a file that is missing.
            with suppress(AttemptError):
                secrets = read_secrets(self._job)
            self._notices = Notices(self._job, attempt, secrets, self._environ)
        self._notices.begin(attempt, self._options.job_id, self._cause)

    def _run_attempt(self, attempt: Attempt, watch: Watch) -> int:
        job = self._job
        variables = {**self._environ, **attempt_variables(job, attempt.number), "LLMCTL_PYTHON": sys.executable}
        if job.secrets_are_read_once and self._secrets is None:
            try:
                self._secrets = read_secrets(job)
            finally:
                remove_secrets(job)
        variables.update(self._secrets or {})
        if job.hosts:
            variables["LLMCTL_NODE"] = str(self._node)
        if self._node > 0:
            address, port = rendezvous_of_head(job, attempt, watch, is_first=self._earlier is None)
            variables.update({"MASTER_ADDR": address, "MASTER_PORT": port})
        else:
            reserved = reserve_port(job, self._options.job_id)
            if reserved is None and job.is_training:
                return 1
            variables["LLMCTL_MASTER_PORT"] = "" if reserved is None else str(reserved)
        with suppress(OSError):
            os.mkdir(f"{attempt.folder}/{FLIGHT_FOLDER}")
        watch.poll_limit()
        # A stop that comes before the launch: launch nothing.
        if not watch.is_over:
            watch.run(processes.start(["bash", f"{attempt.folder}/job.sh", "launch"], variables))
        return watch.code

    def _leave(self, attempt: Attempt, watch: Watch, code: int) -> Tuple[int, bool]:
        """End what is left of an attempt and record its end; returns its code, and True if another one follows."""
        job = self._job
        begins_again = passes_on = False
        may_go_on = job.may_begin_again or self._chain is not None
        if not may_go_on:
            self._remove_secrets(watch)
        processes.kill_attempt(job.run_dir, attempt.number)
        try:
            code, self._cause = self._true_end(attempt, watch, code)
            reason = watch.reason(code)
            further = self._failure(attempt, watch, code) if reason == "failed" and self._node == 0 else {}
            if self._node > 0 and job.may_begin_again:
                further["stays"] = watch.may_stay
            begins_again = further.get("restarts", False)
            if self._chain is not None and not begins_again and not (reason == "failed" and watch.is_over):
                further.update(self._chain.values(attempt, reason, further.get("class", ""), is_late=watch.is_late))
                passes_on = further.get("passes_on", False)
        finally:
            if may_go_on and not begins_again and not passes_on:
                self._remove_secrets(watch)
        attempt.write_exit(code, reason, watch.signal, self._cause, further)
        note_end(job, attempt, further, watch.lost)
        if further.get("stays", False):
            begins_again = await_next(job, attempt, watch)
        if self._chain is not None and passes_on:
            # Only once exit.json is there: the next job may begin at once.
            passes_on = self._chain.pass_on(attempt)
            if not passes_on:
                self._remove_secrets(watch)
        if not begins_again and job.copy_folder:
            remove_copies(job.copy_folder, job.run_id)
        if self._notices is not None and not begins_again and not passes_on:
            self._notices.end(code, reason, self._cause or further.get("output", {}).get("line", ""))
        return code, begins_again

    def _remove_secrets(self, watch: Watch) -> None:
        job = self._job
        if job.hosts:
            if self._node == 0 or not job.shared:
                remove_secrets(job)
        elif watch.signal != "TERM" or watch.is_cancelled:
            # A job that the scheduler requeues needs its secrets again.
            remove_secrets(job)

    def _failure(self, attempt: Attempt, watch: Watch, code: int) -> Dict[str, Any]:
        """Values of exit.json on a failed attempt: its class, the run's progress, and why it does not begin again."""
        job, folder = self._job, attempt.folder
        parts = tuple(end for _, end in failed_parts(folder))
        log = text_since(self._log, self._log_begin)
        unstarted = {} if watch.hang else unstarted_nodes(job, folder, log).nodes
        # After a hang the output tells how the supervisor has ended the ranks; the cause has a shell's words.
        output = None if watch.hang or unstarted else cause_in_output(job, attempt, log)
        shortage = shortage_of(folder) if job.spare_nodes else ""
        absence = find_absence(job, attempt) if job.may_begin_again and not watch.is_over else Absence()
        failure = Failure(
            code,
            job.is_training,
            read_rank_failures(folder),
            parts,
            verdict=NODE if absence.is_lost else HANG if watch.hang else "",
            lost_node=bool(watch.lost) or bool(shortage),
            output=output.kind if output is not None else "",
            unstarted=unstarted,
        )
        reached, kind = read_reached(job.run_dir, attempt.number), class_of(failure)
        values: Dict[str, Any] = {"class": kind, "trained": reached.trained, "saved": reached.saved}
        values.update(culprits_of(failure))
        if failure.unstarted and not failure.verdict:
            values[UNSTARTED] = dict(failure.unstarted)
        if output is not None:
            values["output"] = {"kind": output.kind, "line": output.line}
        values.update(
            lost_steps=max(0, reached.trained - reached.saved), lost_s=round(seconds_since_save(job.run_dir, folder))
        )
        if job.spare_nodes:
            values.update(fault_values(job, folder, failure, kind, self._cause, watch.hanging))
        if not job.may_begin_again or watch.is_over:
            return values
        history, left_s = read_history(job, reached, self._options.job_id), self._stop_after_s()
        in_vain = unstarted_again(job, folder, values.get(UNSTARTED, {}))
        refused = shortage or absence.sentence or in_vain or refusal(job, kind, history, left_s or None)
        if refused:
            tell(f"attempt {attempt.number} failed and is the last one: {refused}")
            return {**values, "not_restarted": refused}
        most = attempt.number + job.max_restarts - history.restarts
        tell(
            f"attempt {attempt.number} failed ({kind}); begins again, as attempt {attempt.number + 1} of at most {most}"
        )
        return {**values, "restarts": True, "most_attempts": most}

    def _true_end(self, attempt: Attempt, watch: Watch, code: int) -> Tuple[int, str]:
        """Exit code and cause of a failure; a launcher's success needs the records of all parts."""
        job = self._job
        if code == 0 and watch.reason(code) == "completed":
            doubt = doubt_about_success(job, attempt, self._node)
            if not doubt:
                return 0, ""
            said = launchers_error(text_since(self._log, self._log_begin))
            quoted = f" and the error {said!r}" if said else ""
            where = f"its output is in `llmctl logs {job.run_id} --job`"
            cause = f"{doubt}: the launcher ended with exit code 0{quoted}; {where}"
            tell(cause)
            return 1, cause
        if watch.hang and watch.signal is None:
            # The codes of the ranks are those of what ended them then.
            return 1, watch.hang
        if code != 0 and job.is_training:
            code = code_of_cause(attempt.folder, code)
        elif code != 0 and watch.signal is None and not watch.lost:
            # After a signal, or where a machine fell silent, the parts may have ended because of the supervisor.
            code = code_of_first_part(attempt.folder, code)
        if code == 0 or watch.signal is not None:
            return code, ""
        return code, cause_of_failure(
            job, attempt, watch.lost, text_since(self._log, self._log_begin), watch.failed_peer
        )

    def _end_request(self, attempt: Attempt) -> EndRequest:
        if self._options.end_by == "file":
            return EndByFile(end_file_of(attempt.folder))
        if self._options.end_by == "command":
            return EndByLaunchLine(end_file_of(attempt.folder))
        if self._options.end_by == "step":
            return EndByStep(self._options.job_id, f"{self._job.run_id}.{attempt.number}")
        return EndBySignal()

    def _left_s(self) -> Optional[float]:
        """Seconds that Slurm leaves the job now; None without a limit, and with other schedulers."""
        return left_of_slurm_job(self._options.job_id, self._environ) if self._options.end_time else None

    def _stop_after_s(self) -> float:
        """Seconds until the run is asked to stop, from job.json or from the scheduler; 0 without a limit.

        The scheduler's own end time also holds for the site's default limit, and for a job whose script starts long
        after the job: Slurm tries a start that a node has not answered again after a minute.
        """
        found = []
        if self._job.stop_after_s:
            found.append(max(self._job.stop_after_s - (time.monotonic() - self._began), 1.0))
        if self._end_time is not None:
            left, grace = self._end_time - time.time(), self._job.stop_grace_s
            found.append(max(left - grace if left > 2 * grace else left / 2, 1.0) if left > 0 else AT_ONCE_S)
        return min(found, default=0.0)


def _append_to(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)

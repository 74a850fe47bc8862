"""Command line of the supervisor, called by job.sh."""

import argparse
import os
import sys
import time
from contextlib import suppress
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from . import each_host, images, processes
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
from .cause import cause_in_output, cause_of_failure, code_of_cause, failed_parts, launchers_error, text_since
from .end_request import EndByFile, EndByLaunchLine, EndBySignal, EndByStep, EndRequest
from .ends import doubt_about_success
from .node import FLIGHT_FOLDER, attempt_variables, end_file_of, run_node
from .notices import Notices, send
from .peers import Peers
from .rendezvous import reserve_port
from .restarts import (
    HANG,
    Failure,
    class_of,
    read_history,
    read_rank_failures,
    read_reached,
    refusal,
    seconds_since_save,
)
from .settings import JobSettings
from .signals import Signals
from .trust import TrustError, check_submission
from .watch import Watch

_LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_")
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_HEAD_TIMEOUT_S = 60.0
_IMAGE_TIMEOUT_S = 600.0
"""For a head node that may have to import an image first."""


def main(arguments: Sequence[str], environ: Dict[str, str]) -> int:
    """Run one act of the command line; returns the exit code.

    Args:
        arguments: the command line without the program.
        environ: of this process.
    """
    options = _parse(arguments)
    try:
        if options.act == "import-image":
            return images.import_image(options.runtime, options.source, options.target, environ)
        if options.act == "notify":
            return send(sys.stdin.read(), environ)
        if options.act == "each-host":
            return _each_host(options, environ)
        job = JobSettings.read(options.job)
        if options.words[:1] == ["node"]:
            attempt, address, port, *node = options.words[1:]
            number = int(node[0]) if node else None
            guarded = options.end_by == "file"
            return run_node(job, environ, int(attempt), address, port, number, guarded=guarded)
        if options.words[:1] == ["end"]:
            act = processes.kill_node if options.words[3:] == ["now"] else processes.ask_ranks_to_end
            act(job.run_dir, *map(int, options.words[1:3]))
            return 0
        code = Supervisor(job, options, environ).run()
    except AttemptError as error:
        tell(str(error))
        return 1
    return 1 if str(code) in options.never_exit.split(",") else code


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="supervisor", description=__doc__)
    acts = parser.add_subparsers(dest="act", metavar="ACT")
    job = acts.add_parser("job", help="run an attempt, or one node of it")
    job.add_argument("--job", required=True, metavar="FILE", help="job.json")
    job.add_argument("--job-id", required=True, metavar="ID", help="the scheduler's id, or a process id")
    job.add_argument(
        "--end-by", choices=("signal", "file", "command", "step"), default="signal", help="see end_request.py"
    )
    job.add_argument("--never-exit", default="", metavar="CODES", help="exit codes that mean more to the scheduler")
    job.add_argument(
        "--end-time", default="", metavar="SECONDS", help="time at which the scheduler ends the job, since 1970"
    )
    job.add_argument("words", nargs="*", help="none | NODE | node ATTEMPT ADDRESS PORT [NODE] | end ATTEMPT NODE [now]")
    each = acts.add_parser("each-host", help="run a command once per host of LLMCTL_HOSTFILE")
    each.add_argument("--end-by", choices=("signal", "file", "command"), default="signal")
    each.add_argument("--through-shell", action="store_true")
    each.add_argument("--first-here", action="store_true")
    each.add_argument("words", nargs=argparse.REMAINDER, help="%%h: the host; %%n: its number")
    acts.add_parser("notify", help="send the notice that stands on standard input, as JSON")
    image = acts.add_parser("import-image", help="fetch an image once for all nodes")
    for name in ("runtime", "source", "target"):
        image.add_argument(name)
    return parser.parse_args(list(arguments))


def _each_host(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    words = options.words
    hosts = each_host.host_names(environ["LLMCTL_HOSTFILE"])
    how = {"through_shell": options.through_shell, "first_here": options.first_here}
    argvs = each_host.commands(words, hosts, **how)
    end_requests: List[EndRequest] = [EndBySignal() for _ in hosts]
    if options.end_by == "file":
        end_requests = [EndByFile(end_file_of(environ["LLMCTL_ATTEMPT_DIR"])) for _ in hosts]
    elif options.end_by == "command":
        # The words up to the script, followed by the act that asks the ranks of a node to end.
        begin = words[: words.index("node")] if "node" in words else words
        act = [*begin, "end", environ["LLMCTL_ATTEMPT"], each_host.NODE]
        asks, kills = (each_host.commands([*act, *how_soon], hosts, **how) for how_soon in ([], ["now"]))
        end_requests = [EndBySignal(), *(each_host.EndByCommand(*argvs, environ) for argvs in zip(asks[1:], kills[1:]))]
        return each_host.run_all(argvs, end_requests, environ, f"{end_file_of(environ['LLMCTL_ATTEMPT_DIR'])}.now")
    return each_host.run_all(argvs, end_requests, environ)


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
            claim_submission(job, options.job_id)
        while True:
            attempt = attempt_on_machine(job, self._node) if job.hosts else new_attempt(job)
            if job.hosts and self._node > 0:
                _append_to(f"{attempt.folder}/node{attempt.suffix}.log")
            code, begins_again = self._attempt(attempt)
            if not begins_again:
                return code
            self._check_files()
            self._earlier = attempt

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
        attempt.write_started(job.submission, self._options.job_id)
        peers = Peers(job, attempt, self._node) if job.hosts and job.shared and job.nodes > 1 else None
        if self._node == 0 and job.notify:
            self._tell_begin(attempt)
        watch = Watch(
            job,
            attempt,
            self._signals,
            self._end_request(attempt),
            stop_after_s=self._stop_after_s(),
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
            address, port = self._rendezvous_of_head(attempt)
            variables.update({"MASTER_ADDR": address, "MASTER_PORT": port})
        else:
            reserved = reserve_port(job, self._options.job_id)
            if reserved is None and job.is_training:
                return 1
            variables["LLMCTL_MASTER_PORT"] = "" if reserved is None else str(reserved)
        with suppress(OSError):
            os.mkdir(f"{attempt.folder}/{FLIGHT_FOLDER}")
        # A stop that comes before the launch: launch nothing.
        if not watch.is_over:
            watch.run(processes.start(["bash", f"{attempt.folder}/job.sh", "launch"], variables))
        return watch.code

    def _rendezvous_of_head(self, attempt: Attempt) -> Sequence[str]:
        """Address and port that the head node has chosen.

        Raises:
            AttemptError: the head node has written no address in time.
        """
        path = f"{attempt.folder}/rendezvous"
        deadline = time.monotonic() + (_IMAGE_TIMEOUT_S if self._job.in_image else _HEAD_TIMEOUT_S)
        while time.monotonic() < deadline:
            with suppress(OSError), open(path) as file:
                words = file.read().split()
                if len(words) == 2:
                    return words
            time.sleep(0.5)
            with suppress(OSError):
                # Reading the directory makes a network file system refresh its cache.
                os.listdir(attempt.folder)
        raise AttemptError(f"the head node has written no address and port to {path}")

    def _leave(self, attempt: Attempt, watch: Watch, code: int) -> Tuple[int, bool]:
        """End what is left of an attempt and record its end; returns its code, and True if another one follows."""
        job = self._job
        begins_again = False
        may_begin_again = job.max_restarts > 0 and not job.hosts
        if not may_begin_again:
            self._remove_secrets(watch)
        processes.kill_attempt(job.run_dir, attempt.number)
        try:
            code, self._cause = self._true_end(attempt, watch, code)
            reason = watch.reason(code)
            further = self._failure(attempt, watch, code) if reason == "failed" and self._node == 0 else {}
            begins_again = further.get("restarts", False)
        finally:
            if may_begin_again and not begins_again:
                self._remove_secrets(watch)
        attempt.write_exit(code, reason, watch.signal, self._cause, further)
        if self._notices is not None and not begins_again:
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
        # After a hang the output tells how the supervisor has ended the ranks.
        output = None if watch.hang else cause_in_output(job, attempt, text_since(self._log, self._log_begin))
        failure = Failure(
            code,
            job.is_training,
            read_rank_failures(folder),
            parts,
            verdict=HANG if watch.hang else "",
            lost_node=bool(watch.lost),
            output=output.kind if output is not None else "",
        )
        reached, kind = read_reached(job.run_dir, attempt.number), class_of(failure)
        values: Dict[str, Any] = {"class": kind, "trained": reached.trained, "saved": reached.saved}
        if output is not None:
            values["output"] = {"kind": output.kind, "line": output.line}
        values.update(
            lost_steps=max(0, reached.trained - reached.saved), lost_s=round(seconds_since_save(job.run_dir, folder))
        )
        if not job.max_restarts or job.hosts or watch.is_over:
            return values
        history, left_s = read_history(job, reached), self._stop_after_s()
        refused = refusal(job, kind, history, left_s or None)
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
        if code == 0 or watch.signal is not None:
            return code, ""
        return code, cause_of_failure(job, attempt, watch.lost, text_since(self._log, self._log_begin))

    def _end_request(self, attempt: Attempt) -> EndRequest:
        if self._options.end_by == "file":
            return EndByFile(end_file_of(attempt.folder))
        if self._options.end_by == "command":
            return EndByLaunchLine(end_file_of(attempt.folder))
        if self._options.end_by == "step":
            return EndByStep(self._options.job_id, f"{self._job.run_id}.{attempt.number}")
        return EndBySignal()

    def _stop_after_s(self) -> float:
        """Seconds until the run is asked to stop, from job.json or from the scheduler; 0 without a limit.

        For the site's default time limit, newer versions of Slurm report the end time.
        """
        end = self._options.end_time
        if self._job.stop_after_s:
            return max(self._job.stop_after_s - (time.monotonic() - self._began), 1.0)
        if not end.isdigit():
            return 0.0
        left, grace = int(end) - time.time(), self._job.stop_grace_s
        return max(left - grace if left > 2 * grace else left / 2, 1.0)


def _append_to(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)

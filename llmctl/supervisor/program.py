"""The supervisor's command line, as job.sh writes it."""

import argparse
import os
import sys
import time
from contextlib import suppress
from typing import Dict, List, Mapping, Sequence

from . import each_host, images, processes
from .attempt import (
    Attempt,
    AttemptError,
    attempt_on_machine,
    claim_submission,
    code_of_cause,
    new_attempt,
    read_secrets,
    remove_secrets,
    tell,
)
from .node import attempt_variables, end_file_of, run_node
from .peers import Peers
from .rendezvous import reserve_port
from .settings import JobSettings
from .signals import Signals
from .tell import ByFile, BySignal, ByStep, Teller
from .watch import Watch

_LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_")
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_HEAD_PATIENCE_S = 60.0
_IMAGE_PATIENCE_S = 600.0
"""Where the head may have to fetch an image first."""


def main(arguments: Sequence[str], environ: Dict[str, str]) -> int:
    """Do what job.sh asks for; returns the exit code.

    Args:
        arguments: of the command line.
        environ: of this process.
    """
    options = _parse(arguments)
    try:
        if options.act == "import-image":
            return images.import_image(options.runtime, options.source, options.target, environ)
        if options.act == "each-host":
            return _each_host(options, environ)
        job = JobSettings.read(options.job)
        if options.words[:1] == ["node"]:
            attempt, address, port, *node = options.words[1:]
            number = int(node[0]) if node else None
            guarded = options.told_by == "file"
            return run_node(job, environ, int(attempt), address, port, number, guarded=guarded)
        if options.words[:1] == ["end"]:
            processes.ask_ranks_to_end(job.run_dir, *map(int, options.words[1:]))
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
    job.add_argument("--job-id", required=True, metavar="ID", help="of the scheduler, or a process id")
    job.add_argument("--told-by", choices=("signal", "file", "step"), default="signal", help="see tell.py")
    job.add_argument("--never-exit", default="", metavar="CODES", help="exit codes that mean more to the scheduler")
    job.add_argument("--end-time", default="", metavar="SECONDS", help="when the scheduler ends the job, since 1970")
    job.add_argument("words", nargs="*", help="none | NODE | node ATTEMPT ADDRESS PORT [NODE] | end ATTEMPT NODE")
    each = acts.add_parser("each-host", help="run a command once per host of LLMCTL_HOSTFILE")
    each.add_argument("--told-by", choices=("signal", "file", "command"), default="signal")
    each.add_argument("--through-shell", action="store_true")
    each.add_argument("--first-here", action="store_true")
    each.add_argument("words", nargs=argparse.REMAINDER, help="%%h: the host; %%n: its number")
    image = acts.add_parser("import-image", help="fetch an image once for all nodes")
    for name in ("runtime", "source", "target"):
        image.add_argument(name)
    return parser.parse_args(list(arguments))


def _each_host(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    words = options.words
    hosts = each_host.host_names(environ["LLMCTL_HOSTFILE"])
    how = {"through_shell": options.through_shell, "first_here": options.first_here}
    argvs = each_host.commands(words, hosts, **how)
    tellers: List[Teller] = [BySignal() for _ in hosts]
    if options.told_by == "file":
        tellers = [ByFile(end_file_of(environ["LLMCTL_ATTEMPT_DIR"])) for _ in hosts]
    elif options.told_by == "command":
        # The words up to the script itself, and then what asks a node's ranks to end.
        begin = words[: words.index("node")] if "node" in words else words
        ends = each_host.commands([*begin, "end", environ["LLMCTL_ATTEMPT"], each_host.NODE], hosts, **how)
        tellers = [BySignal(), *(each_host.ByCommand(argv, environ) for argv in ends[1:])]
    return each_host.run_all(argvs, tellers, environ)


class Supervisor:
    """One attempt on its head node, or on one of several machines."""

    def __init__(self, job: JobSettings, options: argparse.Namespace, environ: Mapping[str, str]) -> None:
        """Take over the signals of this process."""
        self._began = time.monotonic()
        self._signals = Signals()
        self._job = job
        self._options = options
        self._environ = dict(environ)
        if job.forgets_launchers:
            # A job on this machine is no task of an allocation, or rank of a launcher, that llmctl itself may run in.
            self._environ = {
                name: value for name, value in environ.items() if not name.startswith(_LAUNCHERS) and name not in _RANKS
            }
        self._node = int(options.words[0]) if options.words else 0

    def run(self) -> int:
        """Make the attempt, run it and say how it ended.

        Raises:
            AttemptError: no attempt can be made, or this job shall not make one.
        """
        job, options = self._job, self._options
        if job.hosts:
            attempt = attempt_on_machine(job, self._node)
            if self._node > 0:
                _append_to(f"{attempt.folder}/node{attempt.suffix}.log")
        else:
            claim_submission(job, options.job_id)
            attempt = new_attempt(job)
        attempt.write_started(job.submission, options.job_id)
        peers = Peers(job, attempt, self._node) if job.hosts and job.shared and job.nodes > 1 else None
        watch = Watch(
            job,
            attempt,
            self._signals,
            self._teller(attempt),
            stop_after_s=self._stop_after_s(),
            peers=peers,
            is_head=self._node == 0,
        )
        code = 1
        try:
            code = self._run_attempt(attempt, watch)
        except AttemptError as error:
            tell(str(error))
        finally:
            code = self._leave(attempt, watch, code)
        return code

    def _run_attempt(self, attempt: Attempt, watch: Watch) -> int:
        job = self._job
        variables = {**self._environ, **attempt_variables(job, attempt.number), "LLMCTL_PYTHON": sys.executable}
        if job.secrets_are_read_once:
            try:
                variables.update(read_secrets(job))
            finally:
                remove_secrets(job)
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
        # Told to stop before anything has begun: nothing begins.
        if not watch.is_over:
            watch.run(processes.start(["bash", f"{attempt.folder}/job.sh", "launch"], variables))
        return watch.code

    def _rendezvous_of_head(self, attempt: Attempt) -> Sequence[str]:
        """Address and port that the head has chosen.

        Raises:
            AttemptError: there is no word from it.
        """
        path = f"{attempt.folder}/rendezvous"
        deadline = time.monotonic() + (_IMAGE_PATIENCE_S if self._job.in_image else _HEAD_PATIENCE_S)
        while time.monotonic() < deadline:
            with suppress(OSError), open(path) as file:
                words = file.read().split()
                if len(words) == 2:
                    return words
            time.sleep(0.5)
            with suppress(OSError):
                # Reading the directory makes a network file system look again.
                os.listdir(attempt.folder)
        raise AttemptError(f"no word from the head node in {path}")

    def _leave(self, attempt: Attempt, watch: Watch, code: int) -> int:
        job = self._job
        if job.hosts:
            if self._node == 0 or not job.shared:
                remove_secrets(job)
        elif watch.signal != "TERM" or watch.is_cancelled:
            # A job that the scheduler takes back and starts again needs its secrets again.
            remove_secrets(job)
        processes.kill_attempt(job.run_dir, attempt.number)
        if code != 0 and job.is_training:
            code = code_of_cause(attempt.folder, code)
        attempt.write_exit(code, watch.reason(code), watch.signal)
        return code

    def _teller(self, attempt: Attempt) -> Teller:
        if self._options.told_by == "file":
            return ByFile(end_file_of(attempt.folder))
        if self._options.told_by == "step":
            return ByStep(self._options.job_id, f"{self._job.run_id}.{attempt.number}")
        return BySignal()

    def _stop_after_s(self) -> float:
        """Seconds until the run is told to stop, by job.json or by the scheduler.

        Where the time is the site's default, newer versions of Slurm say when it is over.
        """
        seconds, end = float(self._job.stop_after_s), self._options.end_time
        if seconds == 0 and end.isdigit():
            left, grace = int(end) - time.time(), self._job.stop_grace_s
            seconds = max(left - grace if left > 2 * grace else left / 2, 1.0)
        return seconds


def _append_to(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)

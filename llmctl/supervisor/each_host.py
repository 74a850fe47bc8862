"""One command per host, for launchers that start one process per call.

These are qrsh of Grid Engine, pbs_tmrsh of PBS, blaunch of LSF, and this machine itself.
"""

import argparse
import os
import shlex
import signal
import subprocess
import time
from typing import Dict, List, Mapping, Optional, Sequence

from . import processes
from .attempt import tell
from .causes.starts import NO_EXEC
from .end_request import EndByFile, EndBySignal, EndRequest
from .node import end_file_of
from .signals import Signals

FAILURE_GRACE_S = 10
"""Seconds for the other commands to end by themselves after one has failed. Ranks are ended sooner, by watch.py."""
KILL_GRACE_S = 10
HOST, NODE = "%h", "%n"
"""Words of the command that are replaced by the host's name and by its number."""


def commands(words: Sequence[str], hosts: Sequence[str], *, through_shell: bool, first_here: bool) -> List[List[str]]:
    """One argument vector per host.

    Args:
        words: of the command, with HOST and NODE in place of a name and a number.
        hosts: names of the hosts.
        through_shell: join the words after HOST into one, quoted for the shell that the launcher passes the word to.
        first_here: the first host is this host, which needs no launcher: its command begins after HOST.
    """
    begin = words.index(HOST) + 1 if HOST in words else 0
    found = []
    for node, host in enumerate(hosts):
        inner = [str(node) if word == NODE else word for word in words[begin:]]
        outer = [host if word == HOST else word for word in words[:begin]]
        if first_here and node == 0:
            found.append(inner)
        elif through_shell:
            found.append([*outer, " ".join(map(shlex.quote, inner))])
        else:
            found.append([*outer, *inner])
    return found


class EndByCommand(EndRequest):
    """Ask by another command through the same launcher.

    Ending the launcher itself would leave its command running on the host, unwatched.
    """

    def __init__(self, ask: Sequence[str], kill: Sequence[str], environ: Mapping[str, str]) -> None:
        """Ask by one command, and then kill by the other, in this environment."""
        self._argvs = [list(ask), list(kill)]
        self._environ = dict(environ)

    @property
    def can_do_more(self) -> bool:
        """See EndRequest."""
        return bool(self._argvs)

    def send(self, pid: int) -> None:
        """See EndRequest."""
        del pid
        if self._argvs:
            processes.start(self._argvs.pop(0), self._environ)


def host_names(hostfile: str) -> List[str]:
    """Host names of a hostfile: the first word of each line."""
    with open(hostfile, encoding="utf-8", errors="surrogateescape") as file:
        return [line.split()[0] for line in file if line.strip()]


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the command once per host of LLMCTL_HOSTFILE; returns the exit code.

    Args:
        options: of the command line.
        environ: of this process.
    """
    words = options.words
    hosts = host_names(environ["LLMCTL_HOSTFILE"])
    how = {"through_shell": options.through_shell, "first_here": options.first_here}
    argvs = commands(words, hosts, **how)
    end_requests: List[EndRequest] = [EndBySignal() for _ in hosts]
    if options.end_by == "file":
        end_requests = [EndByFile(end_file_of(environ["LLMCTL_ATTEMPT_DIR"])) for _ in hosts]
    elif options.end_by == "command":
        # The words up to the script, followed by the act that asks the ranks of a node to end.
        begin = words[: words.index("node")] if "node" in words else words
        act = [*begin, "end", environ["LLMCTL_ATTEMPT"], NODE]
        asks, kills = (commands([*act, *how_soon], hosts, **how) for how_soon in ([], ["now"]))
        end_requests = [EndBySignal(), *(EndByCommand(*argvs, environ) for argvs in zip(asks[1:], kills[1:]))]
        kill_file = f"{end_file_of(environ['LLMCTL_ATTEMPT_DIR'])}.now"
        return run_all(argvs, end_requests, environ, kill_file, hosts=hosts)
    return run_all(argvs, end_requests, environ, hosts=hosts)


def run_all(
    argvs: Sequence[Sequence[str]],
    end_requests: Sequence[EndRequest],
    environ: Mapping[str, str],
    kill_file: str = "",
    hosts: Sequence[str] = (),
) -> int:
    """Run the commands to their ends; returns the exit code of the first command that failed.

    A failed command ends the others.

    Args:
        argvs: the commands.
        end_requests: one per command, which asks the command to end.
        environ: environment of all commands.
        kill_file: once this file exists, all are ended by the hardest request; empty: no such file.
        hosts: names of the hosts, to tell which one has started nothing; empty: this is not told.
    """
    signals = Signals()
    running: Dict[int, "subprocess.Popen[bytes]"] = {}
    for number, argv in enumerate(argvs):
        running[number] = processes.start(argv, environ)
    code = 0
    deadline: Optional[float] = None
    is_asked = False
    while True:
        failed = _take_ended(running, hosts)
        # The others get a while to end by themselves: their logs tell who failed first.
        if failed and code == 0:
            code, deadline = failed[0], time.monotonic() + FAILURE_GRACE_S
        if not running:
            return code
        if deadline is not None and time.monotonic() >= deadline:
            _end_harder(running, end_requests, is_asked)
            is_asked, deadline = True, time.monotonic() + KILL_GRACE_S
        if kill_file and os.path.exists(kill_file):
            kill_file = ""
            _end_now(running, end_requests)
        if {"TERM", "INT"} & set(signals.wait(0.5)):
            for number, child in running.items():
                end_requests[number].send(child.pid)


def _end_harder(
    running: Mapping[int, "subprocess.Popen[bytes]"], end_requests: Sequence[EndRequest], is_asked: bool
) -> None:
    """Ask all commands to end, or kill them: a program that saves at its end was asked before."""
    for number, child in running.items():
        if is_asked and not end_requests[number].can_do_more:
            processes.signal_group(child.pid, signal.SIGKILL)
        else:
            end_requests[number].send(child.pid)


def _end_now(running: Mapping[int, "subprocess.Popen[bytes]"], end_requests: Sequence[EndRequest]) -> None:
    """End all commands by the hardest request of each."""
    for number, child in running.items():
        end_requests[number].send(child.pid)
        while end_requests[number].can_do_more:
            end_requests[number].send(child.pid)


def _take_ended(running: Dict[int, "subprocess.Popen[bytes]"], hosts: Sequence[str]) -> List[int]:
    """Remove the ended commands from ``running``; returns the exit codes of the failed ones.

    The codes of a part that may not have begun are told, with its host.
    """
    ended = [number for number, child in running.items() if child.poll() is not None]
    codes = [(number, processes.exit_code(running.pop(number).returncode)) for number in ended]
    for number, code in codes:
        if hosts and code in (1, *NO_EXEC):
            tell(f"the part on {hosts[number]} ended with exit code {code}")
    return [code for _, code in codes if code != 0]

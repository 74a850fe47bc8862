"""Choice of the nodes of an attempt among those of the job, called by the launch part of job.sh."""

import argparse
import shlex
import subprocess
from contextlib import suppress
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from .. import each_host
from ..attempt import Attempt, tell
from ..causes.starts import COULD_NOT_START
from ..restarts import read_object
from ..settings import JobSettings
from .faults import LEAVES_OUT, LEFT_OUT, SHORTAGE, read_earlier

ANSWER_S = 60.0
"""Seconds within which a node must start a process: Slurm imports the environment of the site on the first one."""
_SILENT = "does not answer"
_WORD = "answers"
"""Printed by each node: qrsh may end with 0 although it has reached no node."""


class Choice(NamedTuple):
    """Nodes of an attempt, the head first, and those that it does without, with the cause; and a shortage in words."""

    nodes: Tuple[str, ...]
    left_out: Dict[str, str]
    shortage: str = ""


def choose(hosts: Sequence[str], nodes: int, left_out: Mapping[str, str], silent: Set[str]) -> Choice:
    """Choose among all nodes of the job, in their order, so that the ranks keep theirs. Pure.

    Nodes that were left out come back when too few others are left, unless they are silent or could not start the
    program.

    Args:
        hosts: all nodes; the first one, which runs the supervisor, always takes part.
        nodes: number to choose.
        left_out: nodes at fault -> the cause.
        silent: nodes that do not answer.
    """
    head, others = hosts[0], hosts[1:]
    useless = {host for host, why in left_out.items() if why.startswith(COULD_NOT_START)} | silent
    good = [host for host in others if host not in left_out and host not in useless]
    again = [host for host in others if host in left_out and host not in useless]
    taken = {head, *[*good, *again][: nodes - 1]}
    chosen = tuple(host for host in hosts if host in taken)
    causes = {**left_out, **dict.fromkeys(silent, _SILENT)}
    without = {host: causes[host] for host in hosts if host in causes and host not in taken}
    if len(chosen) == nodes:
        return Choice(chosen, without)
    words = ", ".join(f"{host} {causes[host]}" for host in others if host in useless)
    return Choice(chosen, without, f"{len(chosen)} of {len(hosts)} nodes are left for {nodes} to train on: {words}")


def choose_nodes(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the nodes of the attempt, one a line, and record those that it does without; returns the exit code.

    Args:
        options: of the command line: job, probe and hosts.
        environ: of the launch part of job.sh.
    """
    job = JobSettings.read(options.job)
    number = int(environ["LLMCTL_ATTEMPT"])
    attempt = Attempt(number, job.attempt_dir(number))
    earlier = read_earlier(job, number)
    left_out = {}
    for key in (LEFT_OUT, LEAVES_OUT):
        values = earlier.get(key)
        left_out.update(values if isinstance(values, dict) else {})
    silent = {host for host, why in left_out.items() if why == _SILENT}
    choice = choose(options.hosts, job.nodes, left_out, silent)
    while (options.probe or options.starter) and not choice.shortage:
        lost = silent_nodes(choice.nodes[1:], ANSWER_S, shlex.split(options.starter))
        if not lost:
            break
        silent |= lost
        choice = choose(options.hosts, job.nodes, left_out, silent)
    _record(attempt, choice)
    for host, why in choice.left_out.items():
        tell(f"{host} is left out: {why}")
    for host in choice.nodes:
        if host in left_out:
            tell(f"{host} takes part again, as no spare node is left: {left_out[host]}")
    if choice.shortage:
        tell(choice.shortage)
        return 1
    print("\n".join(choice.nodes), flush=True)
    return 0


def _record(attempt: Attempt, choice: Choice) -> None:
    values = read_object(f"{attempt.folder}/started.json")
    if values and (choice.left_out or choice.shortage):
        attempt.write("started.json", {**values, LEFT_OUT: choice.left_out, SHORTAGE: choice.shortage})


def shortage_of(folder: str) -> str:
    """The reason why too few nodes are left for the attempt in this folder; empty if there are enough."""
    return str(read_object(f"{folder}/started.json").get(SHORTAGE) or "")


def silent_nodes(hosts: Sequence[str], limit_s: float, starter: Sequence[str] = ()) -> Set[str]:
    """Nodes of this job on which no process starts within the limit.

    Args:
        hosts: the nodes.
        limit_s: seconds for all of them.
        starter: command that starts a process on HOST; empty: srun, for all at once, then for each by itself.
    """
    if not hosts or (not starter and all(_answer([_srun(hosts)], limit_s))):
        return set()
    by_host = each_host.commands(starter, hosts, through_shell=False, first_here=False)
    answers = _answer(by_host if starter else [_srun([host]) for host in hosts], limit_s)
    return {host for host, answers_well in zip(hosts, answers) if not answers_well}


def _srun(hosts: Sequence[str]) -> List[str]:
    count = len(hosts)
    options = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={','.join(hosts)}"]
    fixed = ["--cpus-per-task=1", "--cpu-bind=none", "--overlap", "--input=none", "--quiet"]
    return ["srun", "--job-name=llmctl-answer", *options, *fixed, "echo", _WORD]


def _answer(argvs: Sequence[Sequence[str]], limit_s: float) -> List[bool]:
    """True for each command that ends well within the limit and has printed the word of ``_WORD``."""
    # In this process's group, so that the end of the launch line ends them too.
    running = [subprocess.Popen(list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) for argv in argvs]
    answers: List[bool] = []
    for child in running:
        said: Optional[bytes] = None
        try:
            said = child.communicate(timeout=limit_s)[0]
        except subprocess.TimeoutExpired:
            limit_s = 0.1  # all have begun at the same time
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=5)
            if child.poll() is None:
                child.kill()
                child.wait()
        answers.append(child.returncode == 0 and said is not None and _WORD.encode() in said)
    return answers

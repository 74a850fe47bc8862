"""Cause of a failed attempt: its exit code, and a sentence for exit.json."""

import os
import re
import signal
from contextlib import suppress
from typing import List, Optional, Tuple

from .attempt import Attempt
from .causes.output import LogCause, find_cause_in_outputs
from .causes.starts import NOBODY, NodeStart, Unstarted, find_unstarted
from .each_host import host_names
from .ends import PartEnd, part_name, read_ends
from .restarts import read_rank_failures
from .settings import JobSettings

_TAIL_BYTES = 65536
_OUTPUT = re.compile(r"(?:node|rank)-\d+\.log$")
_MOST_OUTPUTS = 1024
"""Logs of nodes come first. Their ends take 64 MB."""
_LONGEST = 2000
"""Characters of a cause, whose remedy is at its end."""
_LAUNCHER_SAYS = re.compile(r"^\w+: error: .*", re.MULTILINE)
_LAUNCHER_SAYS_FIRST = re.compile(r"^\w+: error: (?!.*(?:exit code 143|Terminated)$).*", re.MULTILINE)
"""Errors of a launcher; the second without those of tasks that it ended itself, by SIGTERM."""
_SUPERVISOR_SAYS = re.compile(
    r"^llmctl: (?!importing |Grid Engine has started |(?:the|a) notice |the part on |\S+ is left out: "
    r"|\S+ takes part again)(.*)",
    re.MULTILINE,
)
"""Words of the supervisor and of job.sh, without those that report no failure."""
_OF_SIGNALS = 128
"""From here on an exit code is that of a signal."""
_TORCHRUN_SAYS = re.compile(r"failed \(exitcode: -(\d+)\) local_rank:")
_SRUN_SIGNALS = {
    "Killed": int(signal.SIGKILL),
    "Segmentation fault": int(signal.SIGSEGV),
    "Bus error": int(signal.SIGBUS),
    "Aborted": int(signal.SIGABRT),
}
_SRUN_SAYS = re.compile("^srun: error: .*: tasks? [-0-9,]+: ({})".format("|".join(_SRUN_SIGNALS)), re.MULTILINE)
"""Words of torch.distributed.elastic.multiprocessing.api, and of srun (strsignal(3))."""


def code_of_cause(folder: str, code: int) -> int:
    """The exit code of the first rank that failed by itself, or of the first part that did; else ``code``.

    torchrun exits with 1 for any exit code of its ranks. srun exits with the highest code of all ranks, which is the
    code of a rank that srun has ended because another one failed.
    """
    causes = [(rank.time, rank.exit_code) for rank in read_rank_failures(folder) if not rank.consequence]
    if causes:
        return min(causes)[1]
    failed = failed_parts(folder)
    first = failed[0][1] if failed else None
    if first is not None and (_is_killed(first) or 1 < first.code < _OF_SIGNALS):
        return first.code
    own = first.code if first is not None and first.code == 1 else code
    return _code_of_killed_rank(folder) or own


def code_of_first_part(folder: str, code: int) -> int:
    """The exit code of the part of a COMMAND that failed first; else ``code``.

    srun exits with the highest code of all nodes: 143 if it has ended a node because another one failed.
    """
    own = [end.code for _, end in failed_parts(folder) if end.signal != signal.SIGTERM]
    return own[0] if own else code


def _code_of_killed_rank(folder: str) -> int:
    """128 + N of the rank that signal N has killed, by the words of torchrun or srun; 0 if they name none.

    A killed rank leaves no record, and the launcher's own code is that of the ranks that it ended next, by SIGTERM.
    """
    with suppress(OSError):
        names = sorted(name for name in os.listdir(folder) if name.startswith("node-") and name.endswith(".log"))
        for path in [*(f"{folder}/{name}" for name in names), os.path.join(folder, os.pardir, os.pardir, "job.log")]:
            text = ""
            with suppress(OSError), open(path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
            found = [int(number) for number in _TORCHRUN_SAYS.findall(text)]
            found += [_SRUN_SIGNALS[word] for word in _SRUN_SAYS.findall(text)]
            killers = [number for number in found if number != signal.SIGTERM]
            if killers:
                return 128 + killers[0]
    return 0


def cause_of_failure(job: JobSettings, attempt: Attempt, lost: str, log: str, failed_peer: str = "") -> str:
    """Sentence on nodes without the program, the first part that a signal ended, another machine, or last words.

    Args:
        job: settings.
        attempt: the failed attempt.
        lost: sentence on the first machine that fell silent, if no scheduler watches the machines.
        log: text of the job's log of this attempt.
        failed_peer: sentence on the first machine whose part failed; the ranks know better which of them was first.

    Returns:
        The sentence; empty if the ranks have begun, and so report their failures themselves.
    """
    unstarted = unstarted_nodes(job, attempt.folder, log)
    if unstarted.nodes:
        return unstarted.sentence
    failed = failed_parts(attempt.folder)
    # A rank that reports its own error comes first: its launcher may have been killed because of that.
    is_reported = any(not rank.consequence for rank in read_rank_failures(attempt.folder))
    if failed and _is_killed(failed[0][1]) and not is_reported:
        part, end = failed[0]
        what = "the command"
        if job.is_training:
            what = f"rank {int(part[-5:])}" if job.one_process_per_rank else "torchrun"
        return f"{what} on {end.host} was ended by signal {end.signal}"
    if lost:
        return lost
    if attempt.has("heartbeat") or attempt.has("errors"):
        return ""
    return failed_peer or _last(_SUPERVISOR_SAYS, log) or launchers_error(log)


def cause_in_output(job: JobSettings, attempt: Attempt, log: str) -> Optional[LogCause]:
    """The cause that the programs of an attempt have printed; None if ranks have recorded theirs, or no line tells it.

    Args:
        job: settings.
        attempt: the failed attempt.
        log: text of the job's log of this attempt.
    """
    if job.is_training and attempt.has("errors"):
        return None
    names: List[str] = []
    with suppress(OSError):
        names = sorted(name for name in os.listdir(attempt.folder) if _OUTPUT.match(name))
    return find_cause_in_outputs([log, *(text_since(f"{attempt.folder}/{name}", 0) for name in names[:_MOST_OUTPUTS])])


def unstarted_nodes(job: JobSettings, folder: str, log: str) -> Unstarted:
    """Nodes of the attempt in this folder that could not start the program while others did.

    Args:
        job: settings.
        folder: of the attempt.
        log: text of the job's log of this attempt.
    """
    hosts = list(job.hosts)
    with suppress(OSError):
        hosts = hosts or host_names(f"{folder}/hostfile")
    if len(hosts) != job.nodes or job.nodes < 2:
        return NOBODY
    parts = job.ranks_per_node if job.one_process_per_rank else 1
    ends = read_ends(folder)
    nodes = []
    for number, host in enumerate(hosts):
        path = f"{folder}/node-{number:05d}.log"
        names = [part_name(job, number * parts + part) for part in range(parts)]
        own = sorted((ends[name] for name in names if name in ends), key=lambda end: end.time)
        # The first rank that could not start its program tells most; else any that has.
        end = next((one for one in own if one.started is False and one.signal == 0), None)
        end = end or next((one for one in own if one.started), own[0] if own else None)
        if end is None:
            nodes.append(NodeStart(host, os.path.exists(path)))
        else:
            output = text_since(path, 0) if end.started is False else ""
            nodes.append(NodeStart(host, True, end.started, end.code, end.time, output))
    own_errors = (rank.time for rank in read_rank_failures(folder) if not rank.consequence)
    return find_unstarted(nodes, log, parts, min(own_errors, default=None))


def launchers_error(log: str) -> str:
    """The last line in which a launcher, such as srun, reports an error of its own or of a task; empty without one."""
    return _last(_LAUNCHER_SAYS_FIRST, log) or _last(_LAUNCHER_SAYS, log)


def text_since(path: str, position: int) -> str:
    """Text of a log from a position on; only the end of a long log."""
    with suppress(OSError), open(path, "rb") as file:
        file.seek(max(position, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")
    return ""


def _is_killed(end: PartEnd) -> bool:
    """True for an end by a signal that is not a launcher's, which ends the parts that are left by SIGTERM."""
    return end.signal not in (0, signal.SIGTERM)


def failed_parts(folder: str) -> List[Tuple[str, PartEnd]]:
    """Names and ends of the parts that failed, the first failure first."""
    failed = [(part, end) for part, end in read_ends(folder).items() if end.code != 0]
    return sorted(failed, key=lambda named: (named[1].time, named[0]))


def _last(pattern: "re.Pattern[str]", text: str) -> str:
    found = [" ".join(match.group(match.lastindex or 0).split()) for match in pattern.finditer(text)]
    return found[-1][:_LONGEST] if found else ""

"""Text of bjobs, bhist and bhosts -> reports. Pure.

Formats by IBM Spectrum LSF 10.1: bjobs -o, bhist, bhosts in the command reference
(https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=reference-command), and by recorded output, see
tests/recorded/lsf/README.md.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from llmctl.backends.base import JobReport, NodeReport, NodeState
from llmctl.job_state import JobState

FIELDS = ("jobid", "stat", "exit_code", "exit_reason", "exec_host", "job_name", "pend_reason")
"""Columns that bjobs is asked for (bjobs -o). The last may hold the delimiter."""
DELIMITER = "|"

# Ids of array elements are 123[4].
_JOB_ID = re.compile(r"(\d+)(?:\[\d+\])?")
_UNSET = "-"

_LIVING = {
    "PEND": (JobState.PENDING, ""),
    "PROV": (JobState.PENDING, "its hosts are being powered on or prepared"),
    "WAIT": (JobState.PENDING, "waits for the other members of its job chunk"),
    "PSUSP": (JobState.PENDING, "held by its owner or an administrator"),
    "RUN": (JobState.RUNNING, ""),
    "USUSP": (JobState.RUNNING, "suspended by its owner or an administrator"),
    "SSUSP": (JobState.RUNNING, "suspended by LSF"),
    "UNKWN": (JobState.UNKNOWN, "LSF has lost contact with its first host"),
    "ZOMBI": (JobState.UNKNOWN, "its first host is unavailable"),
}
"""JOB STATUS in bjobs(1)."""
_TERMINATIONS = {
    "TERM_RUNLIMIT": JobState.TIMEOUT,
    "TERM_DEADLINE": JobState.TIMEOUT,
    "TERM_OWNER": JobState.CANCELLED,
    "TERM_FORCE_OWNER": JobState.CANCELLED,
    "TERM_ADMIN": JobState.CANCELLED,
    "TERM_FORCE_ADMIN": JobState.CANCELLED,
    "TERM_BUCKET_KILL": JobState.CANCELLED,
    "TERM_PREEMPT": JobState.PREEMPTED,
    "TERM_RC_RECLAIM": JobState.PREEMPTED,
    "TERM_ZOMBIE": JobState.NODE_FAIL,
    "TERM_REMOVE_HUNG_JOB": JobState.NODE_FAIL,
}
"""Reasons for which LSF itself ends a job; all others are failures.

https://www.ibm.com/docs/en/spectrum-lsf/10.1.0 "Termination reasons displayed by bacct, bhist, and bjobs".
"""

# bhist -l folds its lines at 80 characters, even inside words; what goes on is indented by 21 blanks.
_INDENT = " " * 21
_HEADING = re.compile(r"Job <(\d+)(?:\[\d+\])?>")
_NAME = re.compile(r"Job Name <([^>]*)>")
_EVENT = re.compile(r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d(?: \d{4})?: (.*)")
_TERM = re.compile(r"(TERM_\w+)(?:: ([^;.]*))?")
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
# "by signal": Job exit information in Administering Platform LSF 7.3; "signal termination": LSF 10.1.
_EXIT_SIGNAL = re.compile(r"Exited (?:by signal|with signal termination:) (\d+)")
_DISPATCHED = re.compile(r"[Dd]ispatched[^<;]*((?:<[^>]*>[ ,]*)+)")

_NODE_STATES: Mapping[str, tuple[NodeState, str]] = {
    "closed_Full": ("allocated", ""),
    "closed_Excl": ("allocated", ""),
    "closed_Cu_Excl": ("allocated", ""),
    "closed_Busy": ("allocated", "its load is above a threshold"),
    "closed_Adm": ("drained", "closed by an administrator; `bhosts -l` shows the comment"),
    "closed_Lock": ("drained", "locked by an administrator"),
    "closed_Wind": ("drained", "closed by its dispatch window"),
    "closed_EGO": ("drained", "not given to LSF by EGO"),
    "closed": ("drained", "closed; `bhosts -l` shows the reason"),
    "closed_LIM": ("down", "its load information manager cannot be reached"),
    "unavail": ("down", "the host is down, or LSF's daemons there cannot be reached"),
    "unreach": ("down", "sbatchd on the host cannot be reached"),
}
"""STATUS in bhosts(1): https://www.ibm.com/docs/en/spectrum-lsf/10.1.0 "Host status"."""


def parse_jobs(output: str) -> dict[str, JobReport]:
    """The jobs in the output of ``bjobs -noheader -o`` with FIELDS."""
    found = {}
    for line in output.splitlines():
        values = [value.strip() for value in line.split(DELIMITER, len(FIELDS) - 1)]
        match = _JOB_ID.fullmatch(values[0])
        if match and len(values) == len(FIELDS):
            found[match[1]] = _job_report(match[1], values[1:])
    return found


def parse_history(output: str) -> dict[str, JobReport]:
    """The jobs in the output of ``bhist -l`` that have ended."""
    found = {}
    job_id, name, events = "", None, list[str]()
    for line in [*_unfolded(output), "Job <0>"]:
        heading, event = _HEADING.match(line), _EVENT.match(line)
        if heading:
            report = _history_report(job_id, name, events)
            if report is not None:
                found[job_id] = report
            named = _NAME.search(line)
            job_id, name, events = heading[1], named[1] if named else None, []
        elif event:
            events.append(event[1])
    return found


def parse_nodes(output: str) -> list[NodeReport]:
    """The hosts in the output of ``bhosts -w -X``."""
    lines = [line.split() for line in output.splitlines()]
    heading = next((words for words in lines if words[:2] == ["HOST_NAME", "STATUS"]), None)
    if heading is None:
        return []
    rows = [dict(zip(heading, words, strict=True)) for words in lines if len(words) == len(heading)]
    return [_node_report(row) for row in rows if row != dict(zip(heading, heading, strict=True))]


def _job_report(job_id: str, values: Sequence[str]) -> JobReport:
    stat, exit_code, exit_reason, exec_host, name, pend_reason = (value if value != _UNSET else "" for value in values)
    code = int(exit_code) if exit_code.isdecimal() else None
    raw = stat
    if stat == "DONE":
        state, reason, code = JobState.COMPLETED, "", 0
    elif stat == "EXIT":
        state, reason = _ending(exit_reason)
        raw = " ".join(filter(None, [stat, exit_reason.partition(":")[0]]))
    else:
        state, reason = _LIVING.get(stat, (JobState.UNKNOWN, ""))
        reason = pend_reason if stat == "PEND" else reason
        code = None
    return JobReport(job_id, state, raw, name or None, reason, hosts=_hosts(exec_host.split(":")), exit_code=code)


def _ending(exit_reason: str) -> tuple[JobState, str]:
    """State and reason of ``TERM_RUNLIMIT: job killed after reaching LSF run time limit``."""
    match = _TERM.search(exit_reason)
    if match is None:
        return JobState.FAILED, exit_reason
    return _TERMINATIONS.get(match[1], JobState.FAILED), (match[2] or match[1]).strip()


def _unfolded(output: str) -> Iterator[str]:
    whole = ""
    for line in output.splitlines():
        if line.startswith(_INDENT):
            whole += line.removeprefix(_INDENT)
            continue
        yield whole
        whole = line
    yield whole


def _history_report(job_id: str, name: str | None, events: Sequence[str]) -> JobReport | None:
    """The end of a job by the events of its last start; None: no end."""
    state: JobState | None = None
    reason, code, raw, hosts, is_killed = "", None, "", tuple[str, ...](), False
    for event in events:
        signal, exited = _EXIT_SIGNAL.match(event), _EXIT_CODE.match(event)
        dispatched = _DISPATCHED.match(event)
        if dispatched:
            hosts = _hosts(re.findall(r"<([^>]*)>", dispatched[1]))
            state, reason, code, raw, is_killed = None, "", None, "", False  # a job that was requeued begins anew
        elif event.startswith("Signal <KILL> requested"):
            is_killed = True
        elif event.startswith("Done successfully"):
            state, code, raw = JobState.COMPLETED, 0, "Done successfully"
        elif event.startswith("Execution host unavailable; job is killed"):
            state, reason, raw = JobState.NODE_FAIL, "its first host was lost", "Execution host unavailable"
        elif signal or exited:
            state = JobState.CANCELLED if is_killed else JobState.FAILED
            raw = (signal or exited or [""])[0]
            code = 128 + int(signal[1]) if signal else int(exited[1]) if exited else None
        elif event.startswith(("Exited", "Completed <exit>")) and state is None:
            state, raw = JobState.CANCELLED if is_killed else JobState.FAILED, "Exited"
        if "TERM_" in event:
            state, reason = _ending(event)
    if state is None:
        return None
    return JobReport(job_id, state, raw, name, reason, hosts=hosts, exit_code=code)


def _hosts(words: Sequence[str]) -> tuple[str, ...]:
    """``16*node62`` or ``node62``, once each."""
    names = (word.strip().rpartition("*")[2] for word in words)
    return tuple(dict.fromkeys(name for name in names if name))


def _node_report(row: dict[str, str]) -> NodeReport:
    raw = row["STATUS"]
    # What counts is slots, which sites set to the cores of a host.
    slots, used = (int(row[key]) if row.get(key, "").isdecimal() else None for key in ("MAX", "NJOBS"))
    state, reason = _NODE_STATES.get(raw, ("unknown", ""))
    if raw == "ok":
        state = "mixed" if used else "idle"
    elif state == "drained" and used:
        state = "draining"
    return NodeReport(row["HOST_NAME"], state, raw, reason, cores=slots, cores_used=used)

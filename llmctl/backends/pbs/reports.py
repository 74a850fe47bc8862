"""Parser of the job and node reports of PBS Professional and OpenPBS. Pure.

Formats and words from the programs' source (https://github.com/openpbs/openpbs: src/cmds/qstat.c and pbsnodes.c,
src/include/job.h and pbs_internal.h) and the manual pages qstat(1B), pbs_job_attributes(7B), pbsnodes(8B).
"""

import re
from collections.abc import Iterator, Mapping

from llmctl.backends.base import JobReport, NodeReport, NodeState
from llmctl.job_state import JobState

# Sequence number and server, with the array index between them.
_JOB_ID = re.compile(r"(\d+)(?:\[[0-9,:-]*\])?(\.[A-Za-z0-9][A-Za-z0-9._-]*)")
_JOB_LINE = re.compile(r"Job Id: (\S+)")
_ATTRIBUTE = re.compile(r" +([A-Za-z_][\w.]*) = ?(.*)")
_UNSET_TIMES = ("", "UNKNOWN")
_SIGNAL_BASE = 256  # pbs_job_attributes(7B): killed by signal N is 256 + N
_TERMINATED = "91"  # job.h: JOB_SUBSTATE_TERMINATED, set by qdel

_LIVING = {
    "Q": JobState.PENDING,
    "H": JobState.PENDING,
    "W": JobState.PENDING,
    "T": JobState.PENDING,
    "R": JobState.RUNNING,
    "B": JobState.RUNNING,
    "E": JobState.RUNNING,
    "S": JobState.RUNNING,
    "U": JobState.RUNNING,
}
_WORDS_OF_STATE = {
    "H": "held",
    "W": "waits for its start time or its files",
    "T": "is being moved to another queue or server",
    "E": "its nodes are being cleaned up",
    "S": "suspended by the scheduler",
    "U": "suspended because its node is in use",
    "M": "was moved to another server",
}
_HOLDS = {
    "u": "held by its owner",
    "o": "held by an operator",
    "s": "held by the system",
    "p": "held: the password has expired",
}
# job.h, JOB_EXEC_*: PBS's reason for ending the job, in place of an exit status.
_INTERNAL_ENDS = {
    -1: (JobState.FAILED, "PBS could not start it"),
    -2: (JobState.FAILED, "PBS could not start it"),
    -3: (JobState.FAILED, "PBS could not start it"),
    -4: (JobState.NODE_FAIL, "its head node was restarted"),
    -5: (JobState.NODE_FAIL, "its head node was restarted"),
    -6: (JobState.NODE_FAIL, "its head node was restarted"),
    -10: (JobState.FAILED, "its user or group is not known on the node"),
    -11: (JobState.FAILED, "it was to be run again"),
    -14: (JobState.NODE_FAIL, "a node was lost and it was to be run again"),
    -20: (JobState.NODE_FAIL, "the connection to its head node was lost"),
    -24: (JobState.FAILED, "it used more CPUs than it had asked for"),
    -25: (JobState.FAILED, "it used more CPUs than it had asked for"),
    -26: (JobState.FAILED, "it used more virtual memory than it had asked for"),
    -27: (JobState.FAILED, "it used more memory than it had asked for"),
    -28: (JobState.FAILED, "it used more CPU time than it had asked for"),
    -29: (JobState.TIMEOUT, "it reached its time limit"),
    -30: (JobState.NODE_FAIL, "its nodes could not join the job"),
}

_IS_DOWN = {"down", "Stale", "state-unknown", "unresolvable"}
_IS_CLOSED = {"offline", "offline_by_mom", "maintenance"}
_IS_TAKEN = {"job-busy", "job-exclusive", "busy", "resv-exclusive"}
_IS_OPEN = {"free", "job-sharing"}
_KIB = {"b": 1 / 1024, "kb": 1, "mb": 1024, "gb": 1024**2, "tb": 1024**3, "pb": 1024**4}


def plain_job_id(text: str) -> str | None:
    """``1234.server``: a printed id without its array index; None if the text is not an id."""
    match = _JOB_ID.fullmatch(text)
    return f"{match[1]}{match[2]}" if match else None


def parse_jobs(output: str) -> dict[str, JobReport]:
    """Jobs in the output of ``qstat -f``, with or without ``-x``."""
    jobs: dict[str, dict[str, str]] = {}
    attributes: dict[str, str] = {}
    for line in _unfolded(output):
        heading = _JOB_LINE.match(line)
        if heading:
            job_id = plain_job_id(heading[1])
            attributes = jobs.setdefault(job_id, {}) if job_id is not None else {}
            continue
        match = _ATTRIBUTE.match(line)
        if match:
            attributes[match[1]] = match[2].strip()
    return {job_id: _job_report(job_id, found) for job_id, found in jobs.items() if "job_state" in found}


def parse_nodes(output: str) -> list[NodeReport]:
    """Nodes in the output of ``pbsnodes -a``."""
    nodes: list[tuple[str, dict[str, str]]] = []
    for line in output.split("\n"):
        match = _ATTRIBUTE.match(line)
        if match and nodes:
            nodes[-1][1][match[1]] = match[2].strip()
        elif line and not line[0].isspace():
            nodes.append((line.strip(), {}))
    return [_node_report(name, attributes) for name, attributes in nodes if "state" in attributes]


def _unfolded(output: str) -> Iterator[str]:
    """Lines with their continuations joined: PBS breaks long values, and a continuation begins with a tab."""
    whole = ""
    for line in output.split("\n"):
        if line.startswith("\t"):
            whole += line[1:]
            continue
        yield whole
        whole = line
    yield whole


def _job_report(job_id: str, attributes: Mapping[str, str]) -> JobReport:
    letter = attributes["job_state"]
    state, reason, exit_code, raw = _LIVING.get(letter, JobState.UNKNOWN), "", None, letter
    if letter in ("F", "X"):
        state, reason, exit_code = _ending(attributes)
        raw = " ".join([letter, *(f"Exit_status={value}" for value in [attributes.get("Exit_status")] if value)])
    elif letter != "R" and letter != "B":
        reason = _waiting(letter, attributes)
    start = attributes.get("estimated.start_time", "")
    runs = attributes.get("run_count", "")
    return JobReport(
        job_id=job_id,
        state=state,
        raw=raw,
        name=attributes.get("Job_Name"),
        reason=reason,
        expected_start=start if start not in _UNSET_TIMES and state is JobState.PENDING else None,
        hosts=_hosts(attributes.get("exec_host", "")),
        exit_code=exit_code,
        restarts=max(int(runs) - 1, 0) if runs.isdecimal() else None,
    )


def _waiting(letter: str, attributes: Mapping[str, str]) -> str:
    """Reason for a job's wait: the scheduler's comment, or its state and attributes in words."""
    comment = attributes.get("comment", "").removeprefix("Not Running: ")
    if comment and not comment.startswith("Job run at"):
        return comment
    depend = re.findall(r"(?:after\w*|before\w*):(\S+?)(?:@|,|$)", attributes.get("depend", ""))
    if letter == "H" and depend:
        return f"waits for the end of {', '.join(depend)}"
    holds = [_HOLDS[hold] for hold in attributes.get("Hold_Types", "") if hold in _HOLDS]
    return ", ".join(holds) if letter == "H" and holds else _WORDS_OF_STATE.get(letter, "")


def _ending(attributes: Mapping[str, str]) -> tuple[JobState, str, int | None]:
    """State, reason and exit code of a job that has left the queue."""
    text = attributes.get("Exit_status", "")
    status = int(text) if re.fullmatch(r"-?\d+", text) else None
    was_deleted = attributes.get("substate") == _TERMINATED
    if status is None:
        reason = attributes.get("comment", "") or "left the queue without having run"
        return (JobState.CANCELLED if was_deleted else JobState.FAILED), reason, None
    if status < 0:
        known = _INTERNAL_ENDS.get(status, (JobState.FAILED, f"PBS ended it, its code {status}"))
        return *known, None
    code = status if status < _SIGNAL_BASE else 128 + status - _SIGNAL_BASE
    if status == 0:
        return JobState.COMPLETED, "", 0
    if was_deleted:
        return JobState.CANCELLED, "", code
    if code in (128 + 15, 128 + 9) and _used_its_time(attributes):
        return JobState.TIMEOUT, "it reached its time limit", code
    # Versions without substates: qdel leaves only the exit status 271 (TERM).
    if status == _SIGNAL_BASE + 15 and "substate" not in attributes:
        return JobState.CANCELLED, "", code
    return JobState.FAILED, "", code


def _used_its_time(attributes: Mapping[str, str]) -> bool:
    used, limit = (_seconds(attributes.get(f"{kind}.walltime", "")) for kind in ("resources_used", "Resource_List"))
    return used is not None and limit is not None and used >= limit


def _seconds(text: str) -> int | None:
    parts = text.split(":")
    if not all(part.isdecimal() for part in parts):
        return None
    seconds = 0
    for part in parts:
        seconds = seconds * 60 + int(part)
    return seconds


def _hosts(exec_host: str) -> tuple[str, ...]:
    """``hnode001/0*8+hnode002/0`` -> hnode001, hnode002."""
    names = (part.partition("/")[0].strip() for part in exec_host.split("+"))
    return tuple(dict.fromkeys(name for name in names if name))


def _node_report(name: str, attributes: Mapping[str, str]) -> NodeReport:
    raw = attributes["state"]
    state = _node_state(set(raw.split(",")), is_used=bool(attributes.get("jobs")))
    comment = attributes.get("comment", "")
    memory = _number_kib(attributes.get("resources_available.mem", ""))
    return NodeReport(
        name=name,
        state=state,
        raw=raw,
        reason=comment if state in ("drained", "draining", "down") else "",
        gpus=_count(attributes.get("resources_available.ngpus")),
        gpus_used=_count(attributes.get("resources_assigned.ngpus")),
        cores=_count(attributes.get("resources_available.ncpus")),
        cores_used=_count(attributes.get("resources_assigned.ncpus")),
        memory_gib=round(memory / 1024**2, 1) if memory is not None else None,
        queues=tuple(queue for queue in re.split(r"[,\s]+", _queues(attributes)) if queue),
    )


def _queues(attributes: Mapping[str, str]) -> str:
    return attributes.get("queue") or attributes.get("resources_available.Qlist") or ""


def _node_state(words: set[str], *, is_used: bool) -> NodeState:
    if words & _IS_DOWN:
        return "down"
    if words & _IS_CLOSED:
        return "draining" if is_used else "drained"
    if words & _IS_TAKEN:
        return "allocated"
    if words & _IS_OPEN:
        return "mixed" if is_used else "idle"
    return "unknown"


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _number_kib(text: str) -> float | None:
    match = re.fullmatch(r"(\d+)([kmgtp]?b)", text.lower())
    return int(match[1]) * _KIB[match[2]] if match else None

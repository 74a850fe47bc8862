"""Parser of the output of qstat, qacct and qhost. Pure.

Sources: qstat(1), qacct(1), sge_status(5) (states, and the codes behind ``failed``), qhost(1), all of 8.1.9.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from llmctl.backends.base import JobReport, NodeReport, NodeState
from llmctl.job_state import JobState

_ENDED_AT_LIMIT = 37
_AFTER_JOB = 100

_BEFORE_THE_JOB = "Grid Engine could not start the job"
_HOST_DIED = "the node crashed, or Grid Engine lost the job on it"

FAILED_CODES: Mapping[int, tuple[JobState, str]] = {
    **dict.fromkeys((1, 3, 4, 6, 7, 8, 9, 10, 11, 29, 31, 32, 33, 34, 35, 36, 38), (JobState.FAILED, _BEFORE_THE_JOB)),
    26: (JobState.FAILED, "job.log could not be opened in the run directory, as the node sees it"),
    27: (JobState.FAILED, "the node does not have /bin/bash"),
    28: (JobState.FAILED, "the run directory is not there on the node"),
    **dict.fromkeys((18, 19, 20, 21), (JobState.NODE_FAIL, _HOST_DIED)),
    24: (JobState.UNKNOWN, "taken off its nodes, to be started again"),
    25: (JobState.UNKNOWN, "taken off its nodes, to be started again"),
    30: (JobState.UNKNOWN, "its exit code asked Grid Engine to start it again"),
}
"""Meaning of qacct's ``failed`` codes other than 0, 37 and 100, from sge_status(5)."""

_JOB = re.compile(
    r"\s*(?P<id>\d+) +(?P<priority>\S+) +(?P<name>\S.*?) +(?P<user>\S+) +(?P<state>[a-zA-Z]{1,6}) +"
    r"(?P<day>\d\d/\d\d/\d{4}|\d{4}-\d\d-\d\d)[ T]+\d\d:\d\d:\d\d\S*"
)
_FULL = "==="
_DROPPED = re.compile(r"queue instance .* dropped because|All queues dropped because|^\(?Collecting|error state")
_ERROR = re.compile(r"^error reason +\d+: +(?:\S+ +[\d:]+ +)?(?:\[[^]]*\]: *)?(?:error: *)?(.*)")


def state_of(raw: str) -> tuple[JobState, str]:
    """Neutral state for qstat's letters, and a reason if the letters have one. See sge_status(5)."""
    if "E" in raw:
        return JobState.PENDING, "in error: Grid Engine will not start it; cancel it and submit again"
    if "q" in raw or "w" in raw:
        return JobState.PENDING, "held" if "h" in raw else ""
    if not set(raw) <= set("rtRhsSTdNP") or not raw:
        return JobState.UNKNOWN, ""
    reason = "being deleted" if "d" in raw else "suspended" if set(raw) & set("sSTNP") else ""
    return JobState.RUNNING, reason


def parse_queue(text: str) -> dict[str, JobReport]:
    """Jobs of ``qstat -r``, with the reasons for waiting from the ``qstat -j`` after it."""
    listed, _, explained = text.partition(_FULL)
    reports: dict[str, JobReport] = {}
    last = ""
    for line in listed.splitlines():
        match = _JOB.match(line)
        if match:
            last = match["id"]
            # An array has a line per part; a running part decides.
            other = reports.get(last)
            if other is None or other.state is not JobState.RUNNING:
                reports[last] = _listed(match)
        elif last:
            reports[last] = _with_detail(reports[last], line.strip())
    for job_id, reason in _explanations(explained):
        if job_id in reports:
            reports[job_id] = replace(reports[job_id], reason=_joined(reports[job_id], reason))
    return reports


def _listed(match: re.Match[str]) -> JobReport:
    state, reason = state_of(match["state"])
    restarts = int("R" in match["state"])
    return JobReport(match["id"], state, match["state"], match["name"], reason, restarts=restarts)


def _with_detail(report: JobReport, line: str) -> JobReport:
    """The report with a detail line below the job: its whole name, or the jobs that it waits for."""
    key, _, value = (part.strip() for part in line.partition(":"))
    if key == "Full jobname":
        return replace(report, name=value)
    if key == "Predecessor Jobs" and value and report.state is JobState.PENDING:
        return replace(report, reason=f"waits for job {value}")
    return report


def _explanations(text: str) -> Iterator[tuple[str, str]]:
    """Pairs (job id, reason for waiting) of the jobs that ``qstat -j`` describes."""
    job_id, in_info, errors, reasons = "", False, [""], [""]
    for line in [*text.splitlines(), "job_number: end"]:
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "job_number":
            if job_id and (errors[1:] or reasons[1:]):
                yield job_id, "; ".join(dict.fromkeys(errors[1:] or reasons[1:3]))
            job_id, in_info, errors, reasons = value, False, [""], [""]
        elif match := _ERROR.match(line):
            errors.append(match[1])
        elif key == "scheduling info" or (in_info and line.startswith(" ")):
            info = value if key == "scheduling info" else line.strip()
            in_info = True
            reasons += [_reason(info)] if _reason(info) else []
        else:
            in_info = False


def _reason(info: str) -> str:
    """Reason in a line of the scheduler about one job; empty if the line concerns one queue of many."""
    if "because it is full" in info or "because of overload or full" in info:
        return "waits for free nodes"
    return "" if _DROPPED.search(info) or "dependencies" in info else info


def _joined(report: JobReport, reason: str) -> str:
    if "E" in report.raw:
        return f"in error: {reason}; cancel it, fix the cause and submit again"
    return report.reason or reason


def parse_accounts(text: str) -> dict[str, JobReport]:
    """Jobs of ``qacct -j``; of several records of one id the last, which is the newest."""
    reports: dict[str, JobReport] = {}
    for record in re.split(r"^=+$", text, flags=re.MULTILINE):
        pairs = re.finditer(r"^(\S+)[ \t]+(.*\S)[ \t]*$", record, re.MULTILINE)
        fields = {match[1]: match[2] for match in pairs}
        job_id = fields.get("jobnumber", "")
        if job_id.isdecimal() and "failed" in fields:
            reports.pop(job_id, None)
            reports[job_id] = _account(job_id, fields)
    return reports


def _account(job_id: str, fields: Mapping[str, str]) -> JobReport:
    failed = _number(fields["failed"])
    exit_status = _number(fields.get("exit_status", ""))
    state, reason = _ending(failed, exit_status, fields)
    host = fields.get("hostname", "")
    if state is JobState.NODE_FAIL and host:
        reason = f"{reason} ({host})"
    has_run = failed in (0, _ENDED_AT_LIMIT, _AFTER_JOB) and state is not JobState.UNKNOWN
    raw = f"failed {fields['failed']}, exit_status {fields.get('exit_status', '')}"
    return JobReport(
        job_id,
        state,
        re.sub(r"\s+", " ", raw),
        fields.get("jobname"),
        reason,
        exit_code=exit_status if has_run else None,
    )


def _ending(failed: int | None, exit_status: int | None, fields: Mapping[str, str]) -> tuple[JobState, str]:
    """State of an ended job, and its reason in words."""
    if failed in (0, None):
        if exit_status == 0 and _was_forced(fields):
            return JobState.CANCELLED, "deleted by force while its node did not answer"
        return (JobState.COMPLETED if exit_status == 0 else JobState.FAILED), ""
    if failed == _ENDED_AT_LIMIT or "h_rt" in fields["failed"]:
        return _limit(fields)
    if failed == _AFTER_JOB:
        if exit_status == 137:
            return JobState.CANCELLED, "killed: by qdel, or because a process of its own was killed"
        return JobState.FAILED, "job.sh was ended by a signal"
    code = failed if failed is not None else -1
    return FAILED_CODES.get(code, (JobState.FAILED, "Grid Engine says: " + fields["failed"]))


def _was_forced(fields: Mapping[str, str]) -> bool:
    """True if the job was removed by force (qdel -f): the record looks like a success, but without any used time."""
    used = sum(_decimal(fields.get(name, "1")) for name in ("cpu", "ru_utime", "ru_stime"))
    return not used and not _seconds(fields) and fields.get("start_time") != fields.get("end_time")


def _limit(fields: Mapping[str, str]) -> tuple[JobState, str]:
    """State and reason for an exceeded limit: one code stands for three limits, and the run time tells which."""
    asked = re.search(r"\bh_rt=(\d+)", fields.get("category", ""))
    ran_s = _seconds(fields)
    if asked is not None and ran_s and ran_s < 0.9 * int(asked[1]):
        return JobState.FAILED, "ended at a limit of memory or CPU time"
    return JobState.TIMEOUT, "ended by Grid Engine at its time limit"


def _seconds(fields: Mapping[str, str]) -> float:
    # 8.1.9: ru_wallclock 61s; Univa and Altair: wallclock 61.234
    return _decimal(fields.get("wallclock", fields.get("ru_wallclock", "")))


def _decimal(text: str) -> float:
    found = re.match(r"[\d.]+", text)
    return float(found[0]) if found else 0.0


def _number(text: str) -> int | None:
    found = re.match(r"\d+", text)
    return int(found[0]) if found else None


def parse_hosts(hosts: str, queues: str = "") -> list[NodeReport]:
    """Nodes of ``qhost -q -F``, with the queue errors of ``qstat -f -explain E``."""
    reasons = _queue_reasons(queues)
    nodes: list[NodeReport] = []
    for line in hosts.splitlines():
        words = line.split()
        if line[:1].isalnum() and len(words) >= 5 and words[0] not in ("HOSTNAME", "global"):
            nodes.append(_host(words))
        elif nodes and (match := re.match(r"\s+h[lf]:(?:gpu\.ndev|n?gpus?)=([\d.]+)", line)):
            nodes[-1] = replace(nodes[-1], gpus=int(float(match[1])))
        elif nodes and (match := re.match(r"\s+(\S+)\s+[A-Z]+\s+(?:\d+/)?(\d+)/(\d+)\s*(\S*)\s*$", line)):
            name, used, slots, letters = match[1], int(match[2]), int(match[3]), match[4]
            nodes[-1] = _with_queue(nodes[-1], name, used, slots, letters, reasons)
    return [node if node.queues else replace(node, state="unknown", raw="no queue") for node in nodes]


def _host(words: list[str]) -> NodeReport:
    # MEMTOT is fourth from the end; not every version prints NSOC NCOR NTHR.
    memory = re.fullmatch(r"([\d.]+)([KMGT]?)", words[-4])
    factor = {"": 2**-30, "K": 2**-20, "M": 2**-10, "G": 1.0, "T": 1024.0}
    return NodeReport(
        words[0],
        state="idle",
        raw="",
        cores=_number(words[2]),
        memory_gib=float(memory[1]) * factor[memory[2]] if memory else None,
    )


_STATES_BY_WEIGHT: tuple[NodeState, ...] = ("idle", "mixed", "allocated", "draining", "drained", "down")


def _with_queue(
    node: NodeReport, queue: str, used: int, slots: int, letters: str, reasons: Mapping[str, str]
) -> NodeReport:
    state = _queue_state(used, slots, letters)
    reason = reasons.get(f"{queue}@{node.name}") or _LETTERS.get(
        next((letter for letter in "uEdac" if letter in letters), ""), ""
    )
    if node.queues and _STATES_BY_WEIGHT.index(node.state) >= _STATES_BY_WEIGHT.index(state):
        state, reason, letters = node.state, node.reason, node.raw
    return replace(node, state=state, raw=letters or f"{used}/{slots}", reason=reason, queues=(*node.queues, queue))


_LETTERS = {
    "u": "the node does not answer",
    "E": "a queue of it is in error",
    "d": "disabled by an operator",
    "a": "overloaded",
    "c": "its configuration is ambiguous",
}
"""Letters of a queue's state (qstat(1)), in words."""


def _queue_state(used: int, slots: int, letters: str) -> NodeState:
    if "u" in letters:
        return "down"
    if set(letters) & set("dEcDsSCo"):
        return "draining" if used else "drained"
    return "idle" if not used else "allocated" if used >= slots else "mixed"


def _queue_reasons(text: str) -> dict[str, str]:
    """Queue instance -> reason of its error; reasons follow its line, after a tab."""
    reasons: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("\t") and name:
            reasons[name] = "; ".join(part for part in (reasons.get(name, ""), line.strip()) if part)
        elif match := re.match(r"(\S+@\S+)\s", line):
            name = match[1]
    return reasons

"""Decision on the next job of a chain: pure, but for the reader of the time that the run has used."""

from typing import NamedTuple, Optional, Sequence

from ..restarts import NEVER, Reached, crash_loop, read_object
from ..settings import ChainSettings, JobSettings


class Used(NamedTuple):
    """Node-hours and points of all attempts of a run."""

    node_hours: float
    points: float


class JobEnd(NamedTuple):
    """End of a job of a chain.

    Attributes:
        reason: of exit.json: ``timeout`` or ``failed``.
        failure_class: of a failure (see restarts.py); empty for a timeout.
        reached: progress at the end of each attempt of the run, the oldest first.
        used: by all attempts so far.
        is_late: the job began after its time limit.
    """

    reason: str
    failure_class: str
    reached: Sequence[Reached]
    used: Used
    is_late: bool = False


def last_job_reason(job: JobSettings, chain: ChainSettings, end: JobEnd) -> str:
    """The reason why a chain ends with this job; empty if the run's next job is to be submitted."""
    if end.is_late:
        return "the job began after its time limit, as the next one might"
    if end.reason == "failed":
        if end.failure_class in NEVER:
            return NEVER[end.failure_class]
        if not job.is_training:
            return "a COMMAND goes on in a next job only after its time limit"
        if end.failure_class not in job.restart_on:
            return f"{end.failure_class} is not one of job.restart_on ({', '.join(job.restart_on)})"
    if job.is_training:
        saved = end.reached[-1].saved if end.reached else 0
        if chain.until and saved >= chain.until:
            return f"iteration {saved} is saved, and job.chain.until is {chain.until}"
        loop = crash_loop(end.reached)
        if loop:
            return loop
    return _spent(job, chain, end.used)


def _spent(job: JobSettings, chain: ChainSettings, used: Used) -> str:
    """Sentence on the first limit that the next job could exceed; empty if it fits."""
    hours = (job.nodes + job.spare_nodes) * chain.time_s / 3600
    points = hours * (job.points_per_node_hour or 0.0)
    limits = (
        ("node_hours", "node-hours", chain.node_hours, used.node_hours, hours),
        ("points", job.points_unit or "points", chain.points, used.points, points),
    )
    for key, unit, limit, spent, more in limits:
        if limit is not None and spent + more > limit:
            return (
                f"the run has used {spent:.4g} {unit}, the next job may use {more:.4g} more, "
                f"and job.chain.{key} is {limit:.10g}"
            )
    return ""


def read_used(job: JobSettings, attempt: int, now: float) -> Used:
    """Read what the attempts of a run have used, up to one that ends now.

    An attempt that was killed without exit.json counts until its last sign of life. Each attempt counts with the nodes
    and the price of its own submission.

    Args:
        job: settings.
        attempt: number of the attempt that ends now.
        now: seconds since 1970.
    """
    hours = points = 0.0
    for number in range(1, attempt + 1):
        folder = job.attempt_dir(number)
        begun = _time(f"{folder}/started.json")
        ended = now if number == attempt else _time(f"{folder}/exit.json") or _time(f"{folder}/alive.json")
        if begun is None or ended is None:
            continue
        values = read_object(f"{folder}/job.json")
        nodes, spares = values.get("nodes", job.nodes), values.get("spare_nodes", 0)
        spent = max(0.0, ended - begun) / 3600 * (nodes + spares if isinstance(nodes, int) else job.nodes)
        rate = values.get("points_per_node_hour")
        hours += spent
        points += spent * (rate if isinstance(rate, (int, float)) else 0.0)
    return Used(hours, points)


def _time(path: str) -> Optional[float]:
    found = read_object(path).get("time")
    return float(found) if isinstance(found, (int, float)) else None

"""Checks of a chain of jobs, of which each submits the next one. Pure."""

from collections.abc import Iterator

from llmctl.submit.job import Job, Problem


def chain_problems(job: Job) -> Iterator[Problem]:
    """A chain without a queue, with a limit that nothing can be compared with, or after another run."""
    limits, name, key = dict(job.spec.chain or ()), job.profile.name, "job.chain"
    if job.queue is None:
        text = f"is not possible on {name}, which has no queue for a next job: give --max-restarts N instead"
        yield Problem(key, text)
        return
    if job.request.time_s is None and limits.keys() & {"points", "node_hours"}:
        yield Problem(key, "needs the time limit of a job, to know what the next one may use: give --time H:M:S")
    if "points" in limits and (job.cost is None or job.cost.rate is None):
        yield Problem(key, f"points cannot be counted: {name} has no price of these nodes; give node_hours instead")
    if "until" in limits and job.config is None:
        yield Problem(key, "until counts iterations, which a COMMAND does not have: give node_hours or points instead")
    if job.config is not None and limits.get("until", 0) > job.config.training.train_iters:
        text = f"until {limits['until']} is above training.train_iters {job.config.training.train_iters}; lower it"
        yield Problem(key, text, also=(key, "training.train_iters"))
    if job.spec.after is not None:
        text = "does not go with --after: the next jobs would wait for that run again; submit after the run has ended"
        yield Problem(key, text)

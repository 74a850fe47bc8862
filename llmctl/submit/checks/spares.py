"""Checks of a job with spare nodes. Pure."""

from collections.abc import Iterator

from llmctl.submit.job import Job, Problem


def spare_problems(job: Job) -> Iterator[Problem]:
    """Spare nodes without a scheduler, of a part of a node, or with mpirun."""
    key, resource = "job.spare_nodes", job.request.resource
    if job.queue is None:
        text = f"is not possible on {job.profile.name}, which has no scheduler that grants further nodes; leave it out"
        yield Problem(key, text)
    elif resource is not None and resource.fraction:
        text = (
            f"is not possible with {job.request.resource_type}, a part of a node; ask for whole nodes, or leave it out"
        )
        yield Problem(key, text, also=(key, "job.resource_type"))
    elif job.request.launcher == "mpirun":
        others = " or ".join(name for name in job.backend.launchers if name != "mpirun")
        text = f"does not go with the launcher mpirun, whose nodes llmctl does not choose; use --launcher {others}"
        yield Problem(key, text, also=(key, "job.launcher"))

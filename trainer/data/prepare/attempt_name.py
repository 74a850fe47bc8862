"""A name for one start of all nodes that share a preparation, from what started them."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.data.prepare.node_marks import attempt_of_step


def attempt_of_start(variables: Mapping[str, str], nodes: int) -> str:
    """A name that all nodes have in common and no other start has; "" where nothing gives all of them one.

    The innermost launcher comes first: the variables of those around it may be there on some nodes only, as those of
    Slurm's steps are under mpirun. For the same reason the number of a job is no name (JOB_ID, PBS_JOBID,
    SLURM_JOB_ID): processes that are reached by plain ssh do not have it, and nodes that call the same start by two
    names wait for each other in vain. Nor is it new where a script starts them a second time.

    Args:
        variables: the environment.
        nodes: how many processes share the preparation.
    """
    return _of_mpirun(variables, nodes) or attempt_of_step(variables, nodes) or _of_run(variables, nodes)


def _of_mpirun(variables: Mapping[str, str], nodes: int) -> str:
    # Open MPI gives all processes of one mpirun the same namespace, and each mpirun another one.
    size, namespace = variables.get("OMPI_COMM_WORLD_SIZE", ""), variables.get("PMIX_NAMESPACE", "")
    return f"mpirun-{namespace}" if namespace and size.isdecimal() and int(size) >= nodes else ""


def _of_run(variables: Mapping[str, str], nodes: int) -> str:
    # job.sh starts the command of a run once on each node, in an attempt that has a number of its own; a shell in the
    # middle of it may start things as often as it likes.
    run, attempt = variables.get("LLMCTL_RUN_ID"), variables.get("LLMCTL_ATTEMPT")
    is_one_of_nodes = variables.get("NNODES") == str(nodes) and "NODE_RANK" in variables
    is_by_hand = "LLMCTL_INTERACTIVE" in variables
    return f"{run}.{attempt}" if run and attempt and is_one_of_nodes and not is_by_hand else ""

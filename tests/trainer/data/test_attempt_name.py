"""The name of one start of all nodes, from what started them."""

from __future__ import annotations

import pytest

from trainer.data.prepare.attempt_name import attempt_of_start

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "2"}
MPI = {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "4711"}
RUN = {"LLMCTL_RUN_ID": "prepare-1", "LLMCTL_ATTEMPT": "3", "NNODES": "2", "NODE_RANK": "1"}


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        (STEP, "slurm-7.0.2"),
        (MPI, "mpirun-4711"),
        (RUN, "prepare-1.3"),
        # mpirun starts its own daemons by srun, but for the one on the first node.
        (MPI | STEP, "mpirun-4711"),
        (MPI | STEP | RUN, "mpirun-4711"),
        (MPI | {"OMPI_COMM_WORLD_SIZE": "1"} | RUN, "prepare-1.3"),
        ({"PMIX_NAMESPACE": "slurm.pmix.7.2"} | STEP, "slurm-7.0.2"),
        (RUN | {"NNODES": "1"}, ""),
        (RUN | {"LLMCTL_INTERACTIVE": "1"}, ""),
        # Not all processes of a job have its number, nor is it new at each start.
        ({"JOB_ID": "7", "RESTARTED": "0"}, ""),
        ({"PBS_JOBID": "7.pbs"}, ""),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, ""),
        ({}, ""),
    ],
)
def test_the_innermost_that_started_all_nodes_gives_the_name(variables: dict[str, str], name: str) -> None:
    assert attempt_of_start(variables, 2) == name

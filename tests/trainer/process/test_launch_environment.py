"""Ranks from the variables of every launcher, and the refusal of contradictions."""

import pytest

from trainer.process.launch_environment import (
    LaunchEnvironment,
    LaunchError,
    first_host,
    port_of_job,
    resolve_launch_environment,
)

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "23456",
    "TORCHELASTIC_RUN_ID": "none",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "10.0.0.9",
}


def test_nothing_set_is_one_process():
    launch = resolve_launch_environment({})
    assert (launch.rank, launch.world_size, launch.local_world_size, launch.launcher) == (0, 1, 1, "nothing")


def test_torchrun_is_taken_as_it_is_under_any_scheduler():
    # Under torchrun SLURM_PROCID counts torchrun's agents, one per node.
    launch = resolve_launch_environment({**TORCHRUN, **SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"})
    assert launch.launcher == "torchrun"
    assert launch.as_variables() == {key: TORCHRUN[key] for key in TORCHRUN if key != "TORCHELASTIC_RUN_ID"}


def test_srun():
    launch = resolve_launch_environment(SRUN)
    assert (launch.rank, launch.local_rank, launch.world_size, launch.local_world_size) == (6, 2, 7, 3)
    assert launch.master_addr == "gpu03"
    assert launch.launcher == "Slurm"
    first = resolve_launch_environment({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert first.master_port == launch.master_port  # without communication


def test_batch_script_of_a_large_job_is_one_process():
    batch = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"}
    assert resolve_launch_environment(batch).world_size == 1


def test_mpirun_wins_over_the_step_that_started_its_daemons():
    launch = resolve_launch_environment({**SRUN, **MPIRUN, "SLURM_PROCID": "1"})
    assert (launch.rank, launch.local_rank, launch.world_size, launch.launcher) == (3, 1, 4, "Open MPI")


def test_pmi():
    launch = resolve_launch_environment({"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_JOBID": "x"})
    assert (launch.rank, launch.local_rank, launch.world_size, launch.master_addr) == (1, 1, 2, "127.0.0.1")


def test_azure_batch_names_the_master():
    batch = {**MPIRUN, "MASTER_ADDR": "", "AZ_BATCH_MASTER_NODE": "10.0.0.4:23354"}
    launch = resolve_launch_environment(batch)
    assert (launch.master_addr, launch.master_port) == ("10.0.0.4", 23354)
    stated = resolve_launch_environment({**batch, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "23456"})
    assert (stated.master_addr, stated.master_port) == ("10.0.0.9", 23456)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({**MPIRUN, "WORLD_SIZE": "8"}, ("WORLD_SIZE=8", "OMPI_COMM_WORLD_SIZE=4")),
        ({**SRUN, "RANK": "0"}, ("RANK=0", "SLURM_PROCID=6")),
        ({"RANK": "4", "WORLD_SIZE": "4"}, ("RANK=4", "WORLD_SIZE=4")),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, ("LOCAL_RANK=2", "=2")),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, ("LOCAL_WORLD_SIZE=4", "2")),
        ({"RANK": "one", "WORLD_SIZE": "2"}, ("RANK=one",)),
        ({"WORLD_SIZE": "2"}, ("RANK is not set", "WORLD_SIZE=2")),
        ({**MPIRUN, "MASTER_ADDR": ""}, ("MASTER_ADDR", "4 ranks")),
        ({**MPIRUN, "MASTER_ADDR": "", "AZ_BATCH_MASTER_NODE": "10.0.0.4"}, ("AZ_BATCH_MASTER_NODE=10.0.0.4",)),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "99999"}, ("MASTER_PORT=99999",)),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(y2)"}, ("SLURM_STEP_TASKS_PER_NODE=4(y2)",)),
    ],
)
def test_refused_with_both_values(variables, named):
    with pytest.raises(LaunchError) as caught:
        resolve_launch_environment(variables)
    assert all(name in str(caught.value) for name in named), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("node_list", "host"),
    [("gpu[003-005,9],login1", "gpu003"), ("n1,n2", "n1"), ("a", "a"), ("r1[2]n,x", "r12n")],
)
def test_first_host(node_list, host):
    assert first_host(node_list) == host


@pytest.mark.parametrize("node_list", ["", "gpu[", "[", ","])
def test_broken_node_list(node_list):
    with pytest.raises(LaunchError):
        first_host(node_list)


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({}, None),
        ({"LLMCTL_GPUS_PER_NODE": "0", "CUDA_VISIBLE_DEVICES": "0"}, 0),
        ({"LLMCTL_GPUS_PER_NODE": "8"}, 8),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
    ],
)
def test_gpus_of_the_job(variables, gpus):
    assert resolve_launch_environment(variables).gpus_per_node == gpus


def test_ports_of_jobs_differ_and_stay_in_range():
    ports = [port_of_job(str(number), 20000, 29999) for number in range(200)]
    assert min(ports) >= 20000
    assert max(ports) <= 29999
    assert len(set(ports)) > 190


@pytest.mark.parametrize(
    ("address", "local", "world", "expected"),
    [
        ("10.0.0.1", 4, 4, True),
        ("10.0.0.1", 4, 8, False),
        # Two nodes of cluster local.
        ("127.0.0.1", 1, 2, True),
        ("localhost", 1, 2, True),
    ],
)
def test_nodes_of_one_machine_are_recognised(address: str, local: int, world: int, expected: bool) -> None:
    launch = LaunchEnvironment(master_addr=address, local_world_size=local, world_size=world)
    assert launch.is_on_one_machine is expected

"""Slurm in ``llmctl clusters new`` and ``llmctl doctor``: texts of a new profile, commands of the login node."""

from llmctl.backends.base import DoctorCommands, ProfileHints

PROFILE_HINTS = ProfileHints(
    node_types="`sinfo -N -o '%N %P %c %m %G'` shows what there is.",
    example_type="{gpus: 8, gpu: H100, cores: 96, queue: main, max_nodes: 16, max_time: '24:00:00'}",
    launchers="torchrun   # or srun (a process per rank), mpirun",
    group="The account (sbatch --account).",
)
DOCTOR_COMMANDS = DoctorCommands(
    programs=("sbatch", "squeue", "sacct", "scancel", "sinfo", "srun", "salloc", "scontrol"),
    version="sbatch --version",
    queues="sinfo -h -o %R",
    accounts='sacctmgr -nP show assoc user="$(id -un)" format=account',
    accounts_are_complete=True,
    oldest_version="22.05",
)

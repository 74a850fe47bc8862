"""LSF in ``llmctl clusters new`` and ``llmctl doctor``: texts of a new profile, commands of the login node."""

from llmctl.backends.base import DoctorCommands, ProfileHints

PROFILE_HINTS = ProfileHints(
    node_types="A name of your own for each kind of node; `lshosts -w` lists cores and memory, `bqueues` the queues.",
    example_type="{gpus: 8, gpu: H100, cores: 96, queue: normal, max_nodes: 16, max_time: '24:00:00'}",
    launchers="torchrun   # or mpirun",
    group="The project (bsub -P; with group_option -G the user group).",
)
# bsub -V prints to standard error (bsub(1)). bqueues prints a heading first.
DOCTOR_COMMANDS = DoctorCommands(
    programs=("bsub", "bjobs", "bhist", "bkill", "bhosts"),
    version="bsub -V 2>&1 | head -n 1",
    queues="bqueues -w | tail -n +2",
)

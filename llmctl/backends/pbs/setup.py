"""PBS in ``llmctl clusters new`` and ``llmctl doctor``: texts of a new profile, commands of the login node."""

from llmctl.backends.base import DoctorCommands, ProfileHints

PROFILE_HINTS = ProfileHints(
    node_types="In the site's own words (`qstat -Q`): the name is the queue, unless `queue` says another.",
    example_type="{gpus: 8, gpu: H100, cores: 96, max_nodes: 16, max_time: '24:00:00'}",
    launchers="torchrun   # or mpirun",
    group="The group (qsub -P; group_option says where it is -A or -W group_list).",
)
DOCTOR_COMMANDS = DoctorCommands(
    programs=("qsub", "qstat", "qdel", "pbsnodes"), version="qsub --version", queues="qstat -Q"
)

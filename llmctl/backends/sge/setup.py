"""Grid Engine in ``llmctl clusters new`` and ``llmctl doctor``: texts of a new profile, commands of the login node."""

from llmctl.backends.base import DoctorCommands, ProfileHints

PROFILE_HINTS = ProfileHints(
    node_types="In the site's own words (`qconf -sc`): the name stands in -l NAME=N.",
    example_type="{gpus: 4, gpu: A100, cores: 40, max_nodes: 16, max_time: '24:00:00'}",
    launchers="mpirun   # or torchrun",
    group="The group (qsub -g, on the command line).",
)
DOCTOR_COMMANDS = DoctorCommands(
    programs=("qsub", "qstat", "qacct", "qdel", "qhost", "qrsh"),
    version="qsub -help | head -n 1",
    queues="qconf -sql",
    accounts="qconf -sprjl",
)

"""Slurm's words in plain ones: job states, reasons for waiting, refusals. Also parses Slurm's lists of hosts.

Sources: "JOB STATE CODES" and "JOB REASON CODES" of squeue(1), https://slurm.schedmd.com/job_reason_codes.html (the
whole list of reasons, 26.05), "JOB STATE CODES" of sacct(1), slurm_errno.h of 22.05, pyxis 0.24.
"""

import itertools
import re

from llmctl.backends.batch_scheduler import ErrorMessages
from llmctl.job_state import JobState

STATES = {
    "PENDING": JobState.PENDING,
    "CONFIGURING": JobState.PENDING,
    "REQUEUED": JobState.PENDING,
    "REQUEUE_FED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING,
    "RESV_DEL_HOLD": JobState.PENDING,
    "SPECIAL_EXIT": JobState.PENDING,
    "EXPEDITING": JobState.PENDING,
    "RUNNING": JobState.RUNNING,
    "COMPLETING": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STAGE_OUT": JobState.RUNNING,
    "STOPPED": JobState.RUNNING,
    "SUSPENDED": JobState.RUNNING,
    "COMPLETED": JobState.COMPLETED,
    "FAILED": JobState.FAILED,
    "OUT_OF_MEMORY": JobState.FAILED,
    "CANCELLED": JobState.CANCELLED,
    "TIMEOUT": JobState.TIMEOUT,
    "DEADLINE": JobState.TIMEOUT,
    "PREEMPTED": JobState.PREEMPTED,
    "NODE_FAIL": JobState.NODE_FAIL,
    "BOOT_FAIL": JobState.NODE_FAIL,
}
"""Slurm's state -> ours. REVOKED is left out: in a federation the job then runs elsewhere, or has ended there."""

STATE_REASONS = {
    "CONFIGURING": "its nodes are being made ready",
    "REQUEUED": "it was put back into the queue",
    "REQUEUE_FED": "it is being put back into the queue of the federation",
    "REQUEUE_HOLD": "it was put back into the queue and is held; release it with scontrol release",
    "RESV_DEL_HOLD": "its reservation was deleted and it is held",
    "SPECIAL_EXIT": "it was put back into the queue by the site's rules and is held; release it with scontrol release",
    "COMPLETING": "its last processes are being ended",
    "STAGE_OUT": "its files are being copied out of the burst buffer",
    "STOPPED": "it was stopped by SIGSTOP and keeps its nodes",
    "SUSPENDED": "it is suspended and its nodes may be another job's",
    "OUT_OF_MEMORY": "it ran out of memory",
    "DEADLINE": "it could not have ended before its deadline",
    "BOOT_FAIL": "a node did not come up",
    "PREEMPTED": "another job took its nodes",
}
"""Slurm's state -> the part of its meaning that our state lacks."""

LOST_DEPENDENCY = "the job that it waited for did not end as asked"
"""Reason for which Slurm has cancelled a job."""
REASONS = {
    "None": "",
    "null": "",
    "WaitingForScheduling": "the scheduler has not looked at it yet",
    "SchedDefer": "the scheduler has not looked at it yet",
    "Priority": "jobs of higher priority go first",
    "Resources": "its nodes are busy; it is next when they are free",
    "Dependency": "it waits for another job to end",
    "DependencyNeverSatisfied": "the job that it waits for has not ended as asked, so it will never start; cancel it",
    "BeginTime": "its earliest start time has not come yet",
    "JobHeldUser": "it is held by its user; release it with scontrol release",
    "JobHeldAdmin": "it is held by the site's staff; ask them",
    "JobHoldMaxRequeue": "it was put back into the queue too often and is held; release it with scontrol release",
    "JobArrayTaskLimit": "as many tasks of its array run as may run at once",
    "Cleaning": "its last attempt is still being cleaned up",
    "Prolog": "its nodes are being made ready",
    "Licenses": "it waits for a license",
    "Reservation": "its reservation has not begun yet",
    "ReservationDeleted": "its reservation was deleted",
    "ReservationInvalid": "its reservation cannot be used",
    "ReqNodeNotAvail": "a node that it needs is down, drained, reserved or in use",
    "NodeDown": "a node that it needs is down",
    "FrontEndDown": "no front end node is up",
    "PartitionDown": "its partition starts no jobs at present",
    "PartitionInactive": "its partition takes no jobs at present",
    "PartitionNodeLimit": "it asks for more or fewer nodes than its partition gives, or too many of them are down",
    "PartitionTimeLimit": "it asks for more time than its partition gives; ask for less with --time",
    "PartitionConfig": "its partition cannot give what it asks for",
    "BadConstraints": "no node has what it asks for",
    "Constraints": "no node has what it asks for",
    "MaxMemPerLimit": "it asks for more memory per CPU or node than the site allows",
    "AccountNotAllowed": "its account may not use this partition; see --group and --queue",
    "AccountingPolicy": "a limit of its account is reached",
    "InvalidAccount": "its account is not valid; see --group",
    "InvalidQOS": "its quality of service is not valid",
    "QOSNotAllowed": "its quality of service may not be used in this partition",
    "QOSUsageThreshold": "its quality of service has used more than its share",
    "QOSJobLimit": "its quality of service has as many jobs as it may have",
    "QOSResourceLimit": "its quality of service uses as much as it may use",
    "QOSTimeLimit": "its quality of service has used as much time as it may use",
    "QOSGrpJobsLimit": "as many jobs of its quality of service run as may run at once",
    "QOSGrpNodeLimit": "its quality of service uses as many nodes as it may use at once",
    "QOSMaxWallDurationPerJobLimit": "it asks for more time than its quality of service gives; see --time",
    "QOSMaxNodePerJobLimit": "it asks for more nodes than its quality of service gives one job",
    "QOSMaxJobsPerUserLimit": "as many of your jobs run as may run at once",
    "QOSMaxSubmitJobPerUserLimit": "as many of your jobs are in the queue as may be",
    "AssociationJobLimit": "its account has as many jobs as it may have",
    "AssociationResourceLimit": "its account uses as much as it may use",
    "AssociationTimeLimit": "its account has used as much time as it may use",
    "AssocGrpJobsLimit": "as many jobs of its account run as may run at once",
    "AssocGrpNodeLimit": "its account uses as many nodes as it may use at once",
    "AssocGrpCPUMinutesLimit": "its account has spent its CPU time",
    "AssocGrpBillingMinutes": "its account has spent its budget",
    "AssocGrpGRESMinutes": "its account has spent its GPU time",
    "AssocMaxJobsLimit": "as many of your jobs run as may run at once",
    "AssocMaxSubmitJobLimit": "as many of your jobs are in the queue as may be",
    "AssocMaxWallDurationPerJobLimit": "it asks for more time than its account gives; ask for less with --time",
    "BurstBufferResources": "it waits for room in the burst buffer",
    "BurstBufferStageIn": "its files are being copied into the burst buffer",
    "BurstBufferOperation": "the burst buffer failed",
    "PowerNotAvail": "there is not enough power for its nodes",
    "PowerReserved": "the power for its nodes is reserved",
    "FedJobLock": "another cluster of the federation is looking at it",
    "JobLaunchFailure": "it could not be started, or its script was killed",
    "NonZeroExitCode": "its script ended with an error",
    "RaisedSignal": "its script was ended by a signal",
    "TimeLimit": "it reached its time limit",
    "DeadLine": "it could not have ended before its deadline",
    "InactiveLimit": "it did nothing for longer than the site allows",
    "SystemFailure": "Slurm itself, the network or a file system failed",
    "OutOfMemory": "it ran out of memory",
}
"""Slurm's reason -> plain words."""

_LIMITS = (
    ("AssocGrp", "its account uses as much as it may use"),
    ("AssocMax", "it asks for more than its account gives one job"),
    ("QOSGrp", "its quality of service uses as much as it may use"),
    ("QOSMax", "it asks for more than its quality of service gives"),
    ("QOSMin", "it asks for less than its quality of service wants"),
    ("Max", "its account uses as much as it may use"),
)
"""Words for kinds of limits: Slurm has a reason for every limit of every resource, and REASONS only the common ones."""

_MOST_HOSTS = 65_536

_BLOCKED = "Nodes required for job are DOWN, DRAINED or reserved"

_TRANSIENT = (
    "unable to contact slurm controller",
    "socket timed out",
    "zero bytes were transmitted or received",
    "connection refused",
    "connection timed out",
    "connection reset",
    "transport endpoint is not connected",
    "unexpected message received",
    "resource temporarily unavailable",
    "resources temporarily unavailable",
    "slurm backup controller in standby mode",
    "slurm_persist_conn_open",
    "slurmdbd: sending persistconninit",
    "problem talking to the database",
    "unable to contact slurmdbd",
    "munge encode failed",
    'failed to access "/run/munge',
    "rate limit",
    "too many requests",
    "protocol authentication error",
    "jobs are pending and configured to be limited",
)

_NOT_TAKEN = (
    "unable to contact slurm controller (connect failure)",
    "connection refused",
    "slurm backup controller in standby mode",
    "munge encode failed",
    "rate limit",
    "too many requests",
    "jobs are pending and configured to be limited",
)
"""Errors of _TRANSIENT before anything is sent, or from a controller that refuses (slurm_errno.c of 22.05)."""

# Munge errors of the request and of the answer have the same words, except "decode".
_OPEN = ("unable to contact slurm controller", 'failed to access "/run/munge', "protocol authentication error")
_PERHAPS_TAKEN = (*(text for text in _TRANSIENT if text not in (*_NOT_TAKEN, *_OPEN)), "munge decode failed")

_ADVICE = (
    (
        "invalid partition",
        "--queue, or the resource type's queue in the profile, names the partition; sinfo lists them",
    ),
    (
        "invalid account or account/partition",
        "--group names the account; `sacctmgr show associations user=$USER` lists yours",
    ),
    ("invalid qos", "the profile's options name the quality of service; `sacctmgr show qos` lists them"),
    (
        "node count specification invalid",
        "the partition has fewer nodes, or allows fewer for one job; see llmctl nodes",
    ),
    ("requested time limit is invalid", "the partition allows less; ask for less with --time"),
    (
        "requested node configuration is not available",
        "no node of the partition has so many GPUs, cores or so much memory;"
        " see llmctl nodes, and the resource type in the profile",
    ),
    ("memory specification can not be satisfied", "no node has so much memory; see memory_gib of the resource type"),
    ("invalid generic resource", "the site has no GPUs of this name; see gpu_type of the resource type in the profile"),
    (
        "invalid feature specification",
        "the profile's options ask for a feature that no node has; `sinfo -o %f` lists them",
    ),
    ("invalid node name", "--exclude or the profile's options name a node that is not there; `sinfo -N` lists them"),
    ("invalid --time", "--time takes H:M:S"),
    (
        "requested reservation is invalid",
        "--reservation names none that you may use; `scontrol show reservation` lists them",
    ),
    ("job violates accounting/qos policy", "a limit of your account is reached; ask for fewer nodes or less time"),
    ("job dependency problem", "the run of --after is not known to the scheduler any more; leave --after out"),
    ("unrecognized option '--container", "this site has no pyxis; set container.runtime in the profile to what it has"),
    (
        "unrecognized option",
        "this Slurm does not know an option of the profile; see its options and launch.srun_options",
    ),
    ("access/permission denied", "the job is another user's, or your account may not do this"),
    ("dos line breaks", "the script has Windows line ends; see the profile's environment.setup"),
    ("pyxis: couldn't chdir to", "container.workdir is not in the image"),
    (
        "pyxis: --container-mounts: source path does not exist",
        "a mount's source is not on the node; see --mount and container.mounts",
    ),
    (
        "pyxis: mount source must be",
        "a mount is SRC:DST[:FLAGS] with an absolute SRC; see --mount and container.mounts",
    ),
    ("pyxis: failed to create container filesystem", "the image cannot be read on the node; see --container"),
    ("pyxis: failed to import", "the image cannot be fetched: see its name, and ~/.config/enroot/.credentials"),
    ("pyxis: ignoring --container", "a container was set up without an image; give --container"),
    ("slurm_load_ctl_conf error", "this machine has no Slurm that answers; set login.host in the profile's overlay"),
)


def _any_of(*texts: str) -> str:
    return f"(?i){'|'.join(map(re.escape, texts))}"


MESSAGES = ErrorMessages(
    transient=_any_of(*_TRANSIENT),
    not_taken=_any_of(*_NOT_TAKEN),
    perhaps_taken=_any_of(*_PERHAPS_TAKEN),
    advice=tuple((_any_of(text), words) for text, words in _ADVICE),
)
"""Errors of Slurm and pyxis."""


def in_words(reason: str, state: str = "") -> str:
    """Reason in words for people. An unknown reason is returned unchanged.

    Args:
        reason: from squeue; may have details after a comma.
        state: Slurm's word for the job's state, which may add to the reason.
    """
    code, _, detail = reason.strip().strip("()").replace("_", " ").partition(", ")
    words = REASONS.get(code)
    if words is None and reason.startswith(_BLOCKED):
        words, detail = "its nodes are down, drained or kept for jobs of higher priority", ""
    elif words is None:
        kind = next((words for prefix, words in _LIMITS if code.startswith(prefix)), None)
        words, detail = (f"{kind} ({code})" if kind else reason), ("" if kind is None else detail)
    more = detail.removeprefix("UnavailableNodes:")
    told = [STATE_REASONS.get(state, ""), f"{words}: {more}" if more and words != reason else words]
    return "; ".join(dict.fromkeys(part for part in told if part))


def expand_hosts(text: str) -> tuple[str, ...]:
    """Hosts of ``rack[1-2]n[01-03,07],login``, in order; empty if the text is not a list of hosts.

    A list of more than 65,536 hosts gives an empty result too.
    """
    found: list[str] = []
    if text.count("[") != text.count("]"):
        return ()
    for part in re.findall(r"(?:\[[^\]]*\]|[^,\[\]])+", text.strip()):
        tokens = re.split(r"\[([^\]]*)\]", part)
        # Every second part was in brackets.
        choices = [_numbers(token) if index % 2 else [token] for index, token in enumerate(tokens)]
        count = 1
        for choice in choices:
            count *= len(choice)
        if not count or len(found) + count > _MOST_HOSTS:
            return ()
        found += ["".join(words) for words in itertools.product(*choices)]
    return tuple(found)


def _numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        if match is None:
            return []
        first, last = int(match[1]), int(match[2] or match[1])
        if not 0 <= last - first < _MOST_HOSTS:
            return []
        # Leading zeros belong to the name: 09 and 10 follow 08.
        numbers += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return numbers

"""Predicted memory and time of a job, on the devices of its nodes or of this machine."""

import os
from dataclasses import replace

from llmctl.errors import SchedulerError
from llmctl.paths import UserFolders
from llmctl.runs.record import PredictedStep
from llmctl.submit.job import Job
from llmctl.submit.preview.calibration import known_device
from llmctl.submit.start_model import TransportFiles
from llmctl.transport.protocol import Transport
from trainer.config.errors import ConfigError
from trainer.planning.estimate.devices import DEVICES, GIB, Device, find_device
from trainer.planning.estimate.known_sizes import dataset_size, vocabulary_of
from trainer.planning.estimate.links import Links
from trainer.planning.estimate.memory import memory_of_ranks
from trainer.planning.estimate.plan import RunPlan, check_covered, plan_run
from trainer.planning.estimate.speed import step_seconds
from trainer.planning.schedule.placement import ScheduleError

_LOOK_TIMEOUT_S = 20.0
_QUERY = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]


def device_of(job: Job, transport: Transport) -> Device | None:
    """The device of each rank of a job; None if the profile names no known GPU.

    Args:
        job: with every value decided.
        transport: to this machine, for the GPU or the memory of a job that runs on it.
    """
    if job.visible_gpus is not None:
        ranks = job.request.nodes * job.request.ranks_per_node
        return device_here(transport, has_gpus=bool(job.request.gpus_per_node), ranks=ranks)
    resource = job.request.resource
    if resource is None or resource.gpu is None or not job.request.gpus_per_node:
        return None
    device = find_device(resource.gpu, resource.gpu_memory_gib)
    # A device of another size under the same name: the estimate would compare with the wrong memory.
    return device if device is not None and _is_size(device.memory, resource.gpu_memory_gib) else None


def device_here(transport: Transport, *, has_gpus: bool, ranks: int) -> Device | None:
    """The GPU of this machine, or the share of its memory that one of ``ranks`` processes on its CPU has."""
    if not has_gpus:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return replace(DEVICES["CPU"], memory=memory // ranks)
    try:
        answer = transport.run(_QUERY, timeout_s=_LOOK_TIMEOUT_S, only_reads=True)
    except SchedulerError:
        return None
    name, _, mebibytes = answer.stdout.partition("\n")[0].rpartition(", ")
    # Some GPUs have no memory of their own to report: "[N/A]".
    gib = int(mebibytes) / 1024 if mebibytes.strip().isdecimal() else None
    return next((found for word in name.replace("-", " ").split() if (found := find_device(word, gib))), None)


def estimate_of(job: Job, vocabulary: int | None, device: Device | None) -> RunPlan | str:
    """The predicted run, or the reason why there is none."""
    if job.config is None or vocabulary is None:
        return "unknown: no vocabulary size; set model.vocab_size or data.tokenizer_model"
    if device is None:
        return "unknown: the profile names no known GPU; `llmctl plan --device NAME` takes one"
    try:
        return plan_run(job.config, vocabulary, device, job.request.nodes, job.request.ranks_per_node)
    except ConfigError as error:
        return f"unknown: {error.key} {error.problem}"
    except ScheduleError as error:
        return f"unknown: {error}"


def _is_size(memory: int, named_gib: float | None) -> bool:
    return named_gib is None or abs(memory / GIB / named_gib - 1) < 0.1


def predicted_step(job: Job, here: Transport, there: Transport, folders: UserFolders) -> PredictedStep | None:
    """The prediction for the record of a training; None for a COMMAND, or if the vocabulary or device is unknown.

    Args:
        job: with every value decided.
        here: to this machine.
        there: to the machine that has the job's files.
        folders: of the user, with the calibration of the cluster.

    Raises:
        UsageError, RecordError: the calibration or the measured hardware is damaged.
        SchedulerError: the machine cannot be reached.
    """
    config, device = job.config, device_of(job, here)
    if config is None or device is None:
        return None
    files = TransportFiles(there, (*job.profile.container.mounts, *job.spec.mounts))
    vocabulary = vocabulary_of(config, dataset_size(config, files), files)
    if vocabulary is None:
        return None
    known = known_device(folders, job.profile.name, device)
    ranks = job.request.ranks_per_node
    world = job.request.nodes * ranks
    try:
        check_covered(config)
        most = max(rank.total for rank in memory_of_ranks(config, vocabulary, world, known.device.overhead))
        seconds = step_seconds(config, vocabulary, world, Links(ranks, known.device))
    except (ConfigError, ScheduleError):
        return None
    runs = 0 if known.calibration is None else len(known.calibration.runs)
    return PredictedStep(seconds, most, device.name, runs)

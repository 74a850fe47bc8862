"""``python -m trainer bench``: measure the devices of a job and the messages between them; rank 0 writes the document.

Exit codes: 0 done, 1 a measurement failed, 2 bad flags, 3 the devices are not those of the job, 130 interrupted.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainer.config.errors import ConfigError
from trainer.config.records.measured_hardware import HARDWARE, SCHEMA, HardwareDocument
from trainer.config.sections.training import TrainingConfig
from trainer.distributed.rendezvous import join_ranks
from trainer.process.device import choose_device, device_name
from trainer.process.failure import record_failure
from trainer.process.lost_peer import backend_words, lost_peer
from trainer.process.run_directory import write_json
from trainer.speed_test.clock import Clock
from trainer.speed_test.device_speed import measure_device
from trainer.speed_test.messages import build_groups, measure_messages
from trainer.speed_test.sample import RankReport, combine, device_of
from trainer.speed_test.sizes import CPU, GPU, Sizes

if TYPE_CHECKING:
    from trainer.process.launch_environment import LaunchEnvironment
    from trainer.process.run_directory import RunDirectory

_TIMEOUT = timedelta(minutes=3)
"""No message takes a second: a longer wait means that a peer or a link is lost."""
_LOST = {"gone": "another rank has ended: ", "late": "another rank does not answer: "}


class StepError(RuntimeError):
    """A failed step of the measurement. The message names the step and the cause."""


class Steps:
    """The steps of this rank: named in the log before they begin, and in a failure."""

    def __init__(self, *, speaks: bool) -> None:
        """Begin with the choice of the device; a rank that ``speaks`` prints the kinds of steps."""
        self.name = self._kind = "device"
        self._speaks = speaks

    def begin(self, kind: str, size: str = "") -> None:
        """Begin a step of a kind, of some size."""
        self.name = f"{kind} of {size}" if size else kind
        if self._speaks and kind != self._kind:
            print(f"bench: {kind}", flush=True)
        self._kind = kind


def main(
    arguments: Sequence[str], launch: LaunchEnvironment, run: RunDirectory | None, _environment: Mapping[str, str]
) -> int:
    """Measure; returns the exit code. Collective: all ranks, with the same arguments."""
    parser = argparse.ArgumentParser(prog="python -m trainer bench", description=__doc__, allow_abbrev=False)
    parser.add_argument("--cluster", default="", metavar="NAME", help="name of the cluster, for the document")
    cluster = parser.parse_args(arguments).cluster
    steps = Steps(speaks=launch.rank == 0)
    try:
        device = _device(launch)
        steps.begin("rendezvous")
        join_ranks(launch.rank, launch.world_size, device, _TIMEOUT)
        document = measure(device, GPU if device.type == "cuda" else CPU, is_first=launch.local_rank == 0, steps=steps)
        if document is not None:
            document["cluster"], document["run_id"] = cluster, run.path.name if run is not None else ""
            if run is not None:
                write_json(run.path / HARDWARE, document, durable=True)
        # Rank 0 may host the store that other ranks still use.
        dist.barrier()
        dist.destroy_process_group()
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _report(error, steps, launch, run)
    return 0


def _device(launch: LaunchEnvironment) -> torch.device:
    """The GPU of this rank, or the CPU for a job without GPUs.

    Raises:
        ConfigError: torch finds fewer GPUs than the job has.
    """
    try:
        return choose_device(TrainingConfig.model_validate({"train_iters": 0, "seq_length": 1}), launch)
    except ConfigError as error:
        # Its remedy is one of a training config.
        found = error.problem.partition("; ")[0]
        raise ConfigError("GPUs", f"{found}; llmctl doctor checks the torch of the jobs") from None


def measure(device: torch.device, sizes: Sizes, *, is_first: bool, steps: Steps) -> HardwareDocument | None:
    """Measure this device and all groups; the document on rank 0, else None. Collective: all ranks.

    Args:
        device: of this rank.
        sizes: of the measurements.
        is_first: True for the first rank of a node.
        steps: of this rank.

    Raises:
        Exception: that of a step.
    """
    clock, rank, world_size = Clock(device, sizes.seconds), dist.get_rank(), dist.get_world_size()
    # All devices measure side by side, as they compute in training: they share power, cooling and the host's memory.
    dist.barrier()
    samples = [*measure_device(clock, sizes, steps.begin)]
    steps.begin("groups of ranks")
    firsts: list[bool] = _gather(is_first, world_size)
    samples += measure_messages(clock, build_groups(firsts, rank), sizes, steps.begin)
    steps.begin("results of all ranks")
    memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None
    report = RankReport(socket.gethostname(), is_first, device_name(device), memory, tuple(samples))
    reports = _gather(report, world_size)
    return _document(reports, str(dist.get_backend())) if rank == 0 else None


def _gather(value: Any, world_size: int) -> list[Any]:
    """The values of all ranks, in order of rank."""
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def _document(reports: Sequence[RankReport], backend: str) -> HardwareDocument:
    hosts = [report.host for report in reports if report.is_first]
    return {
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cluster": "",
        "run_id": "",
        "device": device_of(reports),
        "device_memory_bytes": min((report.memory for report in reports if report.memory is not None), default=None),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or torch.version.hip,
        "backend": backend,
        "nodes": len(hosts),
        "devices_per_node": len(reports) // len(hosts),
        "hosts": hosts,
        "measurements": combine(reports),
    }


def _report(error: Exception, steps: Steps, launch: LaunchEnvironment, run: RunDirectory | None) -> int:
    """Report this rank's failure with its step; returns the exit code."""
    is_sentence = isinstance(error, ConfigError)
    # The peer has left a record of its own, or was killed; then the launcher tells of its end.
    lost = lost_peer(backend_words(error)) if isinstance(error, RuntimeError) and launch.world_size > 1 else None
    about = _LOST[lost] if lost is not None else "" if is_sentence else f"{type(error).__name__}: "
    cause = StepError(f"{steps.name}: {about}{' '.join(backend_words(error).split())}")
    cause.__cause__ = error
    code = 3 if is_sentence else 1
    record_failure(
        run,
        launch.rank,
        f"local rank {launch.local_rank}",
        0,
        cause,
        exit_code=code,
        consequence=str(cause) if lost else "",
    )
    print(f"trainer bench: rank {launch.rank} on {socket.gethostname()}: {cause}", file=sys.stderr, flush=True)
    return code

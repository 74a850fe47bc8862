"""The preflight at the start of a training run."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trainer.config.errors import ConfigError
from trainer.preflight.check import LIMIT_S, Seat, Verdict, check_nodes, default_store, raise_failure
from trainer.preflight.judgement import CHECKPOINTS
from trainer.process.device import choose_device
from trainer.process.failure import NodeError
from trainer.process.run_directory import write_json

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig
    from trainer.process.heartbeat import Heartbeat
    from trainer.process.launch_environment import LaunchEnvironment
    from trainer.process.run_directory import RunDirectory

_BYTES_PER_PARAMETER = 12
"""Weights and Adam's two moments in fp32: the least that a checkpoint holds with Adam."""
_MOST_SHOWN = 3
_RECORD_S = 3.0
"""Longest wait for the record of the rank that reports a failure, before this rank ends and the launcher the others."""


def choose_sound_device(config: TrainConfig, launch: LaunchEnvironment) -> torch.device:
    """Select the device of this rank (``choose_device``); a node that lacks GPUs is named if a preflight is asked for.

    Raises:
        ConfigError: as ``choose_device``.
        NodeError: torch, which is built for GPUs, finds fewer than the job has asked for on this node.
    """
    try:
        return choose_device(config.training, launch)
    except ConfigError:
        found, asked = torch.cuda.device_count(), launch.gpus_per_node or launch.local_world_size
        if config.job.preflight == "off" or torch.version.cuda is None or found >= asked:
            raise
        host = socket.gethostname()
        raise NodeError(
            f"preflight: node {host} (rank {launch.rank}): number of GPUs: {found}, expected {asked}, as asked "
            "(job.gpus_per_node); leave the node out with --exclude, and tell the administrators",
            (host,),
        ) from None


def run_preflight(
    config: TrainConfig,
    launch: LaunchEnvironment,
    device: torch.device,
    run: RunDirectory | None,
    save: Path | None,
    parameters: int,
    heartbeat: Heartbeat,
) -> None:
    """Check all nodes, and write preflight.json on rank 0. Collective: all ranks.

    Args:
        config: the training config.
        launch: place of this rank.
        device: of this rank.
        run: the run directory; None writes no file.
        save: folder of the checkpoints; None without one.
        parameters: number of the model's parameters.
        heartbeat: of this rank; that of rank 0 shows the remarks.

    Raises:
        NodeError: a node is not fit for the job; on the rank that reports it.
        PeerFailedError: on the other ranks.
        RuntimeError: rank 0 does not answer.
    """
    has_adam = config.optimizer.optimizer == "adam" and not config.checkpoint.no_save_optim
    seat = Seat(
        rank=launch.rank,
        world_size=launch.world_size,
        local_rank=launch.local_rank,
        local_world_size=launch.local_world_size,
        host=socket.gethostname(),
        device=device,
        devices_asked=launch.gpus_per_node if device.type == "cuda" else None,
        folders=tuple(_folders(run, save)),
        save_bytes=parameters * _BYTES_PER_PARAMETER if has_adam and save is not None else 0,
    )
    verdict = check_nodes(seat, default_store("preflight"))
    if launch.rank == 0:
        _tell(verdict, run, heartbeat)
    if verdict.failure is not None and launch.rank != verdict.speaker and run is not None:
        _await_record(run.error(verdict.speaker))
    raise_failure(verdict, launch.rank)


def _folders(run: RunDirectory | None, save: Path | None) -> list[tuple[str, Path]]:
    """Folders that the run writes. A folder of saved checkpoints that is missing has a wait of its own later."""
    found = [("run directory", run.attempt_dir)] if run is not None else []
    if save is not None and (save.is_dir() or run is None or not run.saved.exists()):
        found.append((CHECKPOINTS, save))
    return found


def _tell(verdict: Verdict, run: RunDirectory | None, heartbeat: Heartbeat) -> None:
    for each in verdict.findings:
        print(f"preflight: {'' if each.is_fatal else 'note: '}{each.sentence()}", flush=True)
    if verdict.failure is None:
        heartbeat.warn("; ".join(each.sentence() for each in verdict.findings[:_MOST_SHOWN]), "preflight")
        print(f"preflight: passed in {verdict.seconds:.1f} s (limit {LIMIT_S:.0f} s)", flush=True)
    if run is not None:
        try:
            write_json(run.preflight, verdict.as_plain())
        except OSError as error:
            print(f"preflight: {run.preflight} cannot be written: {error.strerror}", flush=True)


def _await_record(record: Path) -> None:
    end = time.monotonic() + _RECORD_S
    while not record.exists() and time.monotonic() < end:
        time.sleep(0.05)

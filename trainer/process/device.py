"""Device of this rank, its name and its memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trainer.config.errors import ConfigError

if TYPE_CHECKING:
    from trainer.config.sections.training import TrainingConfig
    from trainer.process.launch_environment import LaunchEnvironment


def choose_device(config: TrainingConfig, launch: LaunchEnvironment) -> torch.device:
    """Select the GPU of this local rank, or the CPU.

    The CPU is selected if training.device is cpu, or if the job has no GPUs.

    Raises:
        ConfigError: the job has GPUs but torch finds too few, so that training would silently run on the CPU; or
            training.bf16 is set for a GPU without bf16.
    """
    if config.disable_bf16_reduced_precision_matmul:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    visible = torch.cuda.device_count() if config.device != "cpu" and torch.cuda.is_available() else 0
    if config.device == "cpu":
        return torch.device("cpu")
    if visible == 0:
        _refuse_silent_cpu(config, launch)
        return torch.device("cpu")
    # Slurm may make only its own GPU visible to each task: then every local rank has it as number 0.
    index = launch.local_rank if visible > 1 or launch.local_world_size == 1 else 0
    if index >= visible:
        raise ConfigError(
            "training.device",
            f"local rank {launch.local_rank} finds only {visible} GPUs for {launch.local_world_size} ranks on this "
            "node; start one rank per GPU",
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    if config.bf16 and torch.cuda.get_device_capability(device) < (8, 0):
        raise ConfigError(
            "training.bf16", f"{torch.cuda.get_device_name(device)} has no bf16; use fp16, or a GPU from Ampere on"
        )
    return device


def _refuse_silent_cpu(config: TrainingConfig, launch: LaunchEnvironment) -> None:
    if config.device == "cuda" or launch.gpus_per_node:
        build = "is built without CUDA" if torch.version.cuda is None else "finds no usable GPU (driver or permissions)"
        has = f"the job has {launch.gpus_per_node} GPUs per node" if launch.gpus_per_node else "cuda is requested"
        raise ConfigError(
            "training.device",
            f"{has}, but torch {torch.__version__} {build}; install a CUDA build, or set training.device: cpu",
        )


def device_name(device: torch.device) -> str:
    """Name of the device, for messages and for the table of peak speeds."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Memory in use now, by the names of a row: of this process, and on a GPU of all processes that share the device.

    ``memory_allocated_bytes`` is allocated on a GPU, resident on the CPU.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return {
            "memory_allocated_bytes": int(torch.cuda.memory_allocated(device)),
            "memory_reserved_bytes": int(torch.cuda.memory_reserved(device)),
            "device_memory_used_bytes": total - free,
        }
    resident = int(Path("/proc/self/statm").read_text().split()[1])  # pages (proc_pid_statm(5))
    return {"memory_allocated_bytes": resident * os.sysconf("SC_PAGE_SIZE")}


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: allocated on a GPU, resident on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB (getrusage(2))

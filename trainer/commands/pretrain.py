"""``python -m trainer pretrain``: train by a config file and overriding flags.

Torch-free until training starts.
Exit codes: 0 done, 1 the run failed, 2 bad flags, 3 bad config, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.errors import ConfigError
from trainer.config.train_config import TrainConfig
from trainer.ops.build.build_settings import BuildSettings
from trainer.planning.checks import check_world_size
from trainer.planning.command_line import CommandLine, UsageError, build_train_config, flag_keys, parse_command_line
from trainer.process.failure import record_failure
from trainer.process.garbage import importing_torch

if TYPE_CHECKING:
    from trainer.process.launch_environment import LaunchEnvironment
    from trainer.process.run_directory import RunDirectory


def cuda_defaults(config: TrainConfig) -> dict[str, str]:
    """Environment variables for CUDA's start, to be set unless the user has set them."""
    if config.parallel.tensor_model_parallel_size == 1 or config.parallel.zero_stage >= 2:
        return {}
    # With one hardware queue, kernels start in the order of their launch: a collective of tensor parallelism starts
    # before the matrix product that overlaps with it, and not after that product has filled the device. Fully
    # sharded data parallelism needs many queues instead. From Blackwell on the setting no longer matters, but the
    # device cannot be queried before CUDA starts. (Megatron-LM, megatron/core/tensor_parallel/layers.py,
    # linear_with_grad_accumulation_and_async_allreduce, and validate_args of megatron/training/arguments.py.)
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def allocator_defaults(
    config: TrainConfig,
    launch: LaunchEnvironment,
    environment: Mapping[str, str],
    nvidia: Path = Path("/dev/nvidiactl"),
) -> dict[str, str]:
    """Settings of torch's allocator for a run on NVIDIA GPUs; empty if the user has set some, or without a GPU.

    Segments that grow leave no gaps between blocks of other sizes, which experts, lengths of documents and recompute
    ask for (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage). PYTORCH_CUDA_ALLOC_CONF is
    the name before torch 2.9, which later releases read too.

    Args:
        config: the training config.
        launch: tells a job that has no GPUs.
        environment: of this process.
        nvidia: the device file that the driver makes; torch may not start CUDA yet.
    """
    device = config.training.device
    is_on_gpu = device == "cuda" or (device == "auto" and launch.gpus_per_node != 0 and nvidia.exists())
    if not is_on_gpu or not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}.isdisjoint(environment):
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def tracker_defaults(config: TrainConfig) -> dict[str, str]:
    """Environment variables by which packages of trackers report nothing to their makers, unless the user sets them."""
    if not config.logging.tracker_packages():
        return {}
    return {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}


def main(
    arguments: Sequence[str],
    launch: LaunchEnvironment,
    run: RunDirectory | None,
    environment: MutableMapping[str, str],
) -> int:
    """Train; returns the exit code.

    Collective: all ranks, with the same arguments. Only rank 0 reports errors in them.

    Args:
        arguments: the flags.
        launch: rank and size of the job.
        run: directory of the run's files; None writes none.
        environment: of this process; completed before CUDA starts.
    """
    speaks = launch.rank == 0
    if not arguments or arguments[0] in ("-h", "--help"):
        if speaks:
            print("Usage: python -m trainer pretrain --config FILE [--FLAG VALUE]...\n\nFlags, each a config key:")
            print("\n".join(f"  --{flag:40} {key}" for flag, key in flag_keys().items()))
        return 0
    command_line = CommandLine()
    try:
        command_line = parse_command_line(arguments)
        config = build_train_config(command_line, environment if run is None else None)
        check_world_size(config, launch.world_size)
    except (UsageError, ConfigError) as error:
        is_usage = isinstance(error, UsageError)
        code = 2 if is_usage else 3
        if speaks:
            record_failure(run, launch.rank, f"rank {launch.rank}", 0, error, exit_code=code)
            print(f"trainer pretrain: {error}" if is_usage else _blame(command_line, error), file=sys.stderr)
        return code
    try:
        settings = BuildSettings.from_variables(environment)
    except ConfigError as error:
        # Each node has its own environment.
        record_failure(run, launch.rank, f"rank {launch.rank}", 0, error, exit_code=3)
        print(f"trainer pretrain: {error}", file=sys.stderr)
        return 3
    for note in command_line.notes if speaks else ():
        print(note)
    defaults = cuda_defaults(config) | allocator_defaults(config, launch, environment) | tracker_defaults(config)
    for name, value in defaults.items():
        environment.setdefault(name, value)
    with importing_torch():
        from trainer.training.pretraining import run_pretraining
    return run_pretraining(config, launch, run, settings)


def _blame(command_line: CommandLine, error: ValueError) -> str:
    def blamed(each: ConfigError) -> str:
        if each.key in command_line.values:
            return f"--{each.key.rpartition('.')[2].replace('_', '-')} ({each.key}): {each.problem}"
        return f"{command_line.config_file or 'flags'}: {each.key}: {each.problem}".replace(": : ", ": ")

    return "\nalso: ".join(map(blamed, error.all)) if isinstance(error, ConfigError) else str(error)

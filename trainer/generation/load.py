"""Loading of a trained model for generation, in any layout."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from trainer.config.sections.parallel import ParallelConfig
from trainer.distributed.mesh import ParallelMesh, ProcessGroups, build_process_groups
from trainer.generation.model import GenerationModel
from trainer.ops.dispatch.setup import serial_kernels
from trainer.parallel_model import build_model, parameter_dtype
from trainer.process.device import choose_device
from trainer.process.launch_environment import LaunchEnvironment

if TYPE_CHECKING:
    import torch

    from trainer.generation.source import ModelSource
    from trainer.ops.build.build_settings import BuildSettings


def load_generation_model(
    source: ModelSource,
    parallel: ParallelConfig | None = None,
    *,
    launch: LaunchEnvironment | None = None,
    device: torch.device | None = None,
    settings: BuildSettings | None = None,
) -> GenerationModel:
    """Build this rank's part of the model and read its weights, in the checkpoint's dtype.

    Collective: all ranks of the job, after trainer.distributed.rendezvous.join_ranks. The weights are resharded from
    any layout.

    Args:
        source: the same on all ranks.
        parallel: layout over the ranks, of which only the sizes of tp, pp and ep count; None: one rank. The ranks of
            ep are replicas that generate the same.
        launch: this process; None: it is alone.
        device: None takes the GPU of this rank, or the CPU.
        settings: folders of built kernels; None uses the reference backends.

    Raises:
        CheckpointError: the weights cannot be read.
        ConfigError: the model cannot be divided so, or its GPUs are missing.
    """
    launch = launch or LaunchEnvironment()
    config = source.config_with(parallel or ParallelConfig())
    mesh = ParallelMesh.build(config, launch.rank, launch.world_size)
    if device is None:
        device = choose_device(config.training, launch)
    groups = ProcessGroups()
    if launch.world_size > 1:
        groups = build_process_groups(mesh, timedelta(minutes=config.parallel.distributed_timeout_minutes))
    selection = None
    if settings is not None:
        selection = serial_kernels(config, settings, device, parameter_dtype(config.training))
    kernels, notes = (None, []) if selection is None else (selection.kernels, selection.fallbacks())
    model = build_model(config, source.vocab_size, mesh, groups, device, kernels, is_frozen=True)
    source.fill(model)
    # Without dropout.
    for chunk in model.chunks:
        chunk.eval()
    return GenerationModel(
        model,
        config,
        source.vocab_size,
        source.path,
        source.iteration,
        device,
        (*source.notes, *notes),
    )

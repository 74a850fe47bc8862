"""The ranks of a command that uses a trained model: those of a launcher, or processes on this machine.

Exit codes: 0 done, 1 failed, 3 input that cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist

from trainer.checkpoint.directory import CheckpointError
from trainer.config.errors import ConfigError
from trainer.config.sections.parallel import ParallelConfig
from trainer.data.errors import DataError
from trainer.distributed.rendezvous import join_ranks
from trainer.evaluation.errors import EvaluationError
from trainer.families.format.errors import FamilyError
from trainer.generation.errors import GenerationError
from trainer.generation.load import load_generation_model
from trainer.generation.local_ranks import TIMEOUT, LocalRanks, Work
from trainer.generation.model import GenerationModel
from trainer.generation.source import ModelSource
from trainer.hub.errors import HubError
from trainer.ops.build.build_settings import BuildSettings
from trainer.process.device import choose_device
from trainer.process.launch_environment import LaunchEnvironment, LaunchError, resolve_launch_environment

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

FAILED = 1
BAD_INPUT = 3
INPUT_ERRORS = (CheckpointError, ConfigError, DataError, EvaluationError, FamilyError, GenerationError, HubError)
"""Errors whose message is one sentence for the user."""


def run_on_ranks(
    program: str,
    options: argparse.Namespace,
    environment: MutableMapping[str, str],
    check: Callable[[argparse.Namespace], object],
    work: Work,
) -> int:
    """Do ``work`` on all ranks of the layout; without a launcher this process starts the others on this machine.

    Args:
        program: name of the command, for messages.
        options: its flags, of which those of the layout and ``check`` are read.
        environment: variables of this process; completed.
        check: reads the input without weights; called before other ranks are started, so that bad input is told once.
        work: takes the rank's LaunchEnvironment, its store, ``options`` and BuildSettings; returns an exit code.
    """
    count = options.tensor_parallel * options.pipeline_parallel * options.expert_parallel
    try:
        launch = resolve_launch_environment(environment)
        settings = BuildSettings.from_variables(environment)
        if launch.world_size not in (1, count):
            raise GenerationError(
                f"the launcher started {launch.world_size} ranks, but tensor x pipeline x expert parallel is {count}; "
                "start as many, or one"
            )
        if launch.rank == 0:
            check(options)
        if options.check:
            return 0
    except (LaunchError, *INPUT_ERRORS) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return BAD_INPUT
    # A launcher has started all ranks already; otherwise this process starts them.
    if launch.world_size > 1:
        environment.update(launch.as_variables())
        return work(launch, None, options, settings)
    with LocalRanks(count, environment) as ranks:
        try:
            return ranks.run(work, options, settings)
        except RuntimeError:
            failed = ranks.failed_rank()
            if failed is None:
                raise
            print(f"{program}: rank {failed} has failed; its own message says why", file=sys.stderr)
            return FAILED


def layout_of(options: argparse.Namespace) -> ParallelConfig:
    """The layout of the flags."""
    return ParallelConfig(
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.pipeline_parallel,
        expert_model_parallel_size=options.expert_parallel,
    )


@contextmanager
def model_on_rank(
    program: str,
    source: ModelSource,
    layout: ParallelConfig,
    launch: LaunchEnvironment,
    store: Store | None,
    settings: BuildSettings,
) -> Iterator[GenerationModel]:
    """Join the ranks and load this rank's part; at the end leave them. Rank 0 prints the notes.

    Raises:
        CheckpointError, ConfigError: the weights cannot be read, or the model cannot be divided so.
    """
    device = choose_device(source.config.training, launch)
    if launch.world_size > 1:
        join_ranks(launch.rank, launch.world_size, device, TIMEOUT, store)
    try:
        model = load_generation_model(source, layout, launch=launch, device=device, settings=settings)
        for note in model.notes if launch.rank == 0 else ():
            print(f"{program}: {note}", file=sys.stderr)
        yield model
        # Rank 0 may hold the store that other ranks still use. After an error they may never come.
        if launch.world_size > 1:
            dist.barrier()
    finally:
        if launch.world_size > 1:
            dist.destroy_process_group()


def tell_bad_input(program: str, launch: LaunchEnvironment, error: Exception) -> int:
    """Print the error of a rank; returns the exit code."""
    who = f"rank {launch.rank}: " if launch.world_size > 1 else ""
    print(f"{program}: {who}{error}", file=sys.stderr)
    return BAD_INPUT

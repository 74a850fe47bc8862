"""Kernels of a run at its start: built before the first iteration, or beside the first iterations."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainer.ops.build.build_settings import LineReport
from trainer.ops.dispatch.background_build import BackgroundKernels, begin_in_background
from trainer.ops.dispatch.selection import KernelSelection
from trainer.ops.dispatch.setup import set_up_kernels
from trainer.process.heartbeat import KERNEL_BUILD

if TYPE_CHECKING:
    import torch

    from trainer.checkpoint.save import CheckpointWriter
    from trainer.config.train_config import TrainConfig
    from trainer.ops.build.build_settings import BuildSettings
    from trainer.ops.dispatch.registry import Kernels
    from trainer.process.heartbeat import Heartbeat
    from trainer.process.launch_environment import LaunchEnvironment


class HeartbeatReport(LineReport):
    """Show the progress of a build as this rank's phase."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat

    def progress(self, share: float | None) -> None:
        """Begin the phase of the new percentage; None: that of a rank that waits for others."""
        self._heartbeat.beat(0, KERNEL_BUILD if share is None else _percent(share))

    def show_beside_training(self, share: float | None) -> None:
        """Show the percentage beside the phases of training; None: the build has ended."""
        self._heartbeat.show_beside("" if share is None else _percent(share))


def _percent(share: float) -> str:
    return f"{KERNEL_BUILD} {int(100 * share)}%"


_IN_BACKGROUND = "kernels are being built in the background; the first iterations run on torch operations"


def prepare_kernels(
    config: TrainConfig,
    settings: BuildSettings,
    launch: LaunchEnvironment,
    device: torch.device,
    dtype: torch.dtype,
    heartbeat: Heartbeat,
    resources: ExitStack,
    *,
    is_new: bool,
) -> tuple[KernelSelection, BackgroundKernels | None]:
    """Kernels for the first iterations, and those that follow if the library is built beside them.

    A run on one machine, from its first iteration on, need not wait for the library. Collective: all ranks.

    Args:
        config: the run's config.
        settings: cache folder and compilers.
        launch: rank and size of the job.
        device: device of the activations.
        dtype: dtype of the activations.
        heartbeat: shows the progress of a build before training.
        resources: a build beside training ends when they are closed.
        is_new: True if the run continues no checkpoint. The same on all ranks.
    """
    following, report = None, HeartbeatReport(heartbeat)
    if is_new and launch.is_on_one_machine:
        is_first = launch.rank == 0
        show = report.show_beside_training
        following = begin_in_background(config, settings, device, dtype, show, is_first_rank=is_first)
    if following is None:
        is_builder = launch.local_rank == 0
        return set_up_kernels(config, settings, device, dtype, report, is_builder=is_builder), None
    resources.callback(following.end)
    return replace(following.at_first, notes=[_IN_BACKGROUND]), following


@dataclass(frozen=True)
class KernelSwitch:
    """The change of a run to the kernels that were built beside it. Every rank has one.

    Attributes:
        following: the kernels that were built.
        kernels: the run's kernels, which layers and optimizer use.
    """

    following: BackgroundKernels
    kernels: Kernels

    def make(self, iteration: int, writer: CheckpointWriter | None) -> tuple[CheckpointWriter | None, list[str]]:
        """Switch between two iterations; returns the writer with the new labels, and lines for the log.

        Collective: all ranks.

        Args:
            iteration: the last completed iteration.
            writer: of the run's checkpoints; None without.
        """
        found = self.following.take()
        if isinstance(found, str):
            return writer, [f"warning: the kernels could not be built: {found}; the run goes on with torch operations"]
        self.kernels.switch_to(found.kernels)
        natively = [name for name, backend in found.backends.items() if backend == "native"]
        first = [f"iteration {iteration + 1}: native kernels from here"] if natively else []
        return writer and replace(writer, kernels=found.labels), [*first, *found.lines()]

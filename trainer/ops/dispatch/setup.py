"""Kernel setup of a run: build missing kernels, load them, select backends.

Collective: all ranks of the job. A single process has ``builds`` None and builds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trainer.ops.build.build_cache import LIMIT_S
from trainer.ops.build.build_settings import BuildError, LineReport, joined
from trainer.ops.build.device_image import (
    IMAGE_COMPILERS,
    DeviceImage,
    ImageCompiler,
    compiled_name,
    load_device_image,
)
from trainer.ops.dispatch.build_consensus import BuildConsensus
from trainer.ops.dispatch.library import LEVELS, Library, built_name, load_built, load_on_demand
from trainer.ops.dispatch.selection import (
    Availability,
    KernelSelection,
    choose_kernels,
    slow_processor,
    with_cpu_memory,
)
from trainer.planning.kernel_choice import RequestedBackend, requested_backends, requested_in_cpu_memory

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig
    from trainer.ops.build.build_settings import BuildSettings

_SHARE_OF_TIMEOUT = 0.4
"""Share of the distributed timeout that one build may take."""


@dataclass(frozen=True)
class KernelSetup:
    """Access of one rank to the built kernels.

    Attributes:
        settings: cache folder and compilers.
        device: device of the activations.
        builds: True if this rank builds missing kernels for its node; None: a single process that only uses existing
            builds.
        may_build: False: the rank that builds takes an existing library, too.
        limit_s: limit of one build, including the wait for other builders, in seconds.
        report: receives lines and progress of builds.
    """

    settings: BuildSettings
    device: torch.device
    builds: bool | None = None
    may_build: bool = True
    limit_s: float = LIMIT_S
    report: LineReport = field(default_factory=LineReport)

    def availability(self, requested: Mapping[str, RequestedBackend]) -> Availability:
        """Availability of the requested backends on this rank. Collective unless ``builds`` is None."""
        if not {selection.backend for selection in requested.values()} & {"auto", "native"}:
            return Availability({}, {}, Availability({}, {}))
        library = self._library()
        if self.device.type == "cpu":
            return _on_cpu(library)
        image = self._image(library)
        if isinstance(image, BuildError):
            return Availability({"native": reason_of(image)}, {}, _on_cpu(library))
        return Availability({}, {"native": str(image)}, _on_cpu(library))

    def _library(self) -> Library | BuildError:
        """The library, on the best instruction set that all ranks' processors support."""
        take = partial(load_built, self.settings)
        make = partial(load_on_demand, self.settings, self.report, self.limit_s) if self.may_build else take
        library = self.ranks.obtain(partial(built_name, self.settings), make, take)
        level = len(LEVELS) if isinstance(library, BuildError) else LEVELS.index(library.level)
        lowest = self.ranks.lowest(level)
        return library if isinstance(library, BuildError) or lowest == level else library.at_level(LEVELS[lowest])

    def _image(self, library: Library | BuildError) -> DeviceImage | BuildError:
        """The image of the first compiler whose image every rank can load; otherwise this rank's last outcome."""
        errors: list[BuildError] = []
        for by in IMAGE_COMPILERS:
            image = self._image_by(by, library)
            if isinstance(image, BuildError):
                errors.append(image)
            if not self.ranks.any(isinstance(image, BuildError)):
                for error in errors:
                    if error.log and self.builds:
                        self.report.say(f"kernels: {error.reason}")
                return image
        return joined(errors) if errors else image

    def _image_by(self, by: ImageCompiler, library: Library | BuildError) -> DeviceImage | BuildError:
        def path() -> Path:
            if isinstance(library, BuildError):
                raise library
            return library.path

        def load(name: str | None, *, may_build: bool) -> DeviceImage:
            where = (path(), self.settings, self.device, by)
            return load_device_image(*where, self.report, self.limit_s, may_build=may_build, name=name)

        return self.ranks.obtain(
            lambda: compiled_name(path(), self.settings, self.device, by),
            partial(load, None, may_build=True),
            partial(load, may_build=False),
        )

    @property
    def ranks(self) -> BuildConsensus:
        """The consensus of the ranks on builds."""
        return BuildConsensus(self.device, self.builds)


def _on_cpu(library: Library | BuildError) -> Availability:
    """Availability for tensors in CPU memory."""
    if isinstance(library, BuildError):
        return Availability({"native": reason_of(library)}, {})
    slow = slow_processor(library.level)
    return Availability({} if slow is None else {"native": slow}, {"native": library.level})


def reason_of(error: BuildError) -> str:
    """The reason of a failed build in one sentence, with the command that prints the compiler's output."""
    return f"{error.reason}; llmctl env kernels build prints the full log" if error.log else error.reason


def set_up_kernels(
    config: TrainConfig,
    settings: BuildSettings,
    device: torch.device,
    dtype: torch.dtype,
    report: LineReport | None = None,
    *,
    is_builder: bool,
) -> KernelSelection:
    """Select the kernels of one rank of a job. Collective: all ranks.

    The process group must be initialized.

    Args:
        config: the run's config.
        settings: cache folder and compilers.
        device: device of the activations.
        dtype: dtype of the activations.
        report: receives lines and progress of builds; None: lines on standard output.
        is_builder: True if this rank builds missing kernels; one rank per node.

    Raises:
        ConfigError: the config names a backend that is not available. Raised on all ranks.
    """
    requested = requested_backends(config)
    limit_s = min(LIMIT_S, _SHARE_OF_TIMEOUT * 60.0 * config.parallel.distributed_timeout_minutes)
    setup = KernelSetup(settings, device, is_builder, limit_s=limit_s, report=report or LineReport())
    availability = setup.availability(requested)
    selection = choose_kernels(requested, availability, device, dtype, is_alone=False)
    return (
        selection
        if device.type == "cpu"
        else with_cpu_memory(selection, requested_in_cpu_memory(config), availability, device)
    )


def serial_kernels(
    config: TrainConfig, settings: BuildSettings, device: torch.device, dtype: torch.dtype
) -> KernelSelection:
    """Select the kernels of a single process, without building anything.

    Missing backends are replaced by the next best.
    """
    # A machine that reads a checkpoint may lack a backend that the run's config names.
    requested = {
        name: replace(
            selection, backend=selection.backend if selection.backend == "reference" else "auto", is_named=False
        )
        for name, selection in requested_backends(config).items()
    }
    return choose_kernels(
        requested, KernelSetup(settings, device).availability(requested), device, dtype, is_alone=True
    )

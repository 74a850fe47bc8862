"""A build of the library beside training: the first iterations run on torch's operations."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from trainer.ops.build.build_settings import BuildError, LineReport, outcome_of
from trainer.ops.dispatch.library import build_unloaded, is_unbuilt
from trainer.ops.dispatch.selection import Availability, KernelSelection, choose_kernels
from trainer.ops.dispatch.setup import KernelSetup, reason_of
from trainer.planning.kernel_choice import RequestedBackend, requested_backends

if TYPE_CHECKING:
    import torch

    from trainer.config.train_config import TrainConfig
    from trainer.ops.build.build_settings import BuildSettings

ShowShare = Callable[[float | None], None]
_NICENESS = 10
_LIMIT_S = 24 * 3600.0
"""Nothing waits for the build, which is slow while training takes all cores."""
_END_S = 5.0
"""Wait for the end of a cancelled build, which kills its compilers within a second. A build that waits for another
process has none."""


class _QuietReport(LineReport):
    """No lines at the start and the end of the build, of which the run tells; only its progress."""

    def __init__(self, show: ShowShare) -> None:
        self._show = show

    def progress(self, share: float | None) -> None:
        self._show(share)

    @contextmanager
    def building(self, what: str) -> Iterator[None]:
        del what
        yield


class LibraryBuild:
    """A build in a thread of low priority, which its compilers inherit. Loads nothing."""

    def __init__(self, settings: BuildSettings, show: ShowShare) -> None:
        self.error: BuildError | None = None
        """Error of the build; None before its end."""
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(settings, show), name="kernel build", daemon=True)
        self._thread.start()

    def _run(self, settings: BuildSettings, show: ShowShare) -> None:
        own = threading.get_native_id()
        # Linux has a niceness per thread. A lower one than the present one would need a privilege.
        os.setpriority(os.PRIO_PROCESS, own, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, own)))
        report = _QuietReport(show)
        found = outcome_of(partial(build_unloaded, settings, report, self._cancelled.is_set, _LIMIT_S))
        show(None)
        self.error = found if isinstance(found, BuildError) else None

    @property
    def has_ended(self) -> bool:
        """True after the end of the build, also after a failure."""
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """End the build with all compilers, if it has not ended."""
        self._cancelled.set()
        self._thread.join(_END_S)


@dataclass(frozen=True)
class BackgroundKernels:
    """One rank's part in a build beside training.

    Attributes:
        at_first: kernels until the build has ended.
        build: on rank 0, None elsewhere.
    """

    at_first: KernelSelection
    build: LibraryBuild | None
    _setup: KernelSetup
    _requested: Mapping[str, RequestedBackend]
    _dtype: torch.dtype

    @property
    def have_ended(self) -> bool:
        """True on rank 0 after the end of the build, False elsewhere."""
        return self.build is not None and self.build.has_ended

    def end(self) -> None:
        """End the build with all compilers, if it has not ended."""
        if self.build is not None:
            self.build.cancel()

    def take(self) -> KernelSelection | str:
        """The selection with the built library, or the reason for the end without one. Collective: all ranks."""
        error = self.build.error if self.build is not None else None
        problem = self._setup.ranks.of_first("" if error is None else reason_of(error))
        if problem:
            return problem
        device = self._setup.device
        return choose_kernels(
            self._requested, self._setup.availability(self._requested), device, self._dtype, is_alone=False
        )


def begin_in_background(
    config: TrainConfig,
    settings: BuildSettings,
    device: torch.device,
    dtype: torch.dtype,
    show: ShowShare,
    *,
    is_first_rank: bool,
) -> BackgroundKernels | None:
    """Begin to build a missing library on rank 0; None if the run must wait for it, or has nothing to build.

    Collective: all ranks, on one machine.

    Args:
        config: the run's config.
        settings: cache folder and compilers.
        device: device of the activations.
        dtype: dtype of the activations.
        show: shows the share of the library that is built, from another thread; None after the end.
        is_first_rank: True on rank 0.
    """
    if not _may_change(config, device):
        return None
    setup = KernelSetup(settings, device, is_first_rank, may_build=False)
    if not setup.ranks.any(is_first_rank and outcome_of(partial(is_unbuilt, settings)) is True):
        return None
    requested = requested_backends(config)
    missing = Availability({"native": "is being built"}, {})
    found = choose_kernels(requested, missing, device, dtype, is_alone=False)
    # The run tells of the build in one line.
    others = {name: [reason for reason in given if reason[0] != "native"] for name, given in found.passed_over.items()}
    build = LibraryBuild(settings, show) if is_first_rank else None
    return BackgroundKernels(replace(found, passed_over=others), build, setup, requested, dtype)


def _may_change(config: TrainConfig, device: torch.device) -> bool:
    """True if the config neither names a backend nor asks for reproducible bits: the switch changes the rounding."""
    training = config.training
    return (
        device.type == "cpu"
        and training.kernel_backend == "auto"
        and not training.kernel_backends
        and not training.deterministic_mode
    )

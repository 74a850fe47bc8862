"""Python's garbage collector in a training loop. Torch-free.

Source: Megatron-LM's ``--manual-gc`` (megatron/training/training.py).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from typing_extensions import Self

if TYPE_CHECKING:
    from trainer.config.sections.training import TrainingConfig


@contextmanager
def importing_torch() -> Iterator[None]:
    """Collect nothing while torch is imported, and never look at its objects again.

    The import makes several hundred thousand objects that stay: each full collection on the way, and the one before the
    first step, would visit them all, for a tenth of the time of a start.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


class GarbageCollector:
    """Keeps collections short, and on request at the same steps on all ranks, as a context manager.

    A full collection visits every object of the process: several hundred thousand after the imports and the build, for
    longer than a step may take, while the other ranks wait. Objects that exist at the start are therefore frozen: no
    collection visits them until the end. Memory does not grow by this: an object is still freed as soon as nothing
    refers to it, and a later cycle of frozen objects can hold only what was there at the start.
    """

    def __init__(self, *, is_manual: bool, interval: int, collects_at_evaluations: bool) -> None:
        """Choose the steps after which garbage is collected.

        Args:
            is_manual: collect only as the other arguments say, instead of when Python's thresholds are passed.
            interval: steps between collections; 0: none between steps.
            collects_at_evaluations: collect before and after each evaluation too.
        """
        self._is_manual, self._interval = is_manual, interval
        self._collects_at_evaluations = collects_at_evaluations
        self._was_enabled = False

    @classmethod
    def build(cls, config: TrainingConfig) -> Self:
        """The collector of a config."""
        return cls(
            is_manual=config.manual_gc,
            interval=config.manual_gc_interval,
            collects_at_evaluations=config.manual_gc_eval,
        )

    def __enter__(self) -> Self:
        """Freeze all objects that are in use."""
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        if self._is_manual:
            gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Go back to the state before."""
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def after_step(self, iteration: int) -> None:
        """Collect if the interval ends with ``iteration``."""
        if self._is_manual and self._interval and iteration % self._interval == 0:
            gc.collect()

    @contextmanager
    def beside_evaluation(self) -> Iterator[None]:
        """Collect before and after an evaluation, which is the context."""
        collects = self._is_manual and self._collects_at_evaluations
        if collects:
            gc.collect()
        yield
        if collects:
            gc.collect()

"""Timers of the parts of a step, as rows of metrics.jsonl show them.

A part is timed from an idle device to an idle device: the host waits for the device at both ends, since the host's
time alone says nothing about work that a GPU has queued. So timers slow a run down, the more the higher their level.
With level 0 nothing waits, no message is sent and no clock is read. Source: Megatron-LM, megatron/core/timers.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch.profiler import record_function

from trainer.distributed.collectives import all_gather_single

if TYPE_CHECKING:
    from trainer.config.sections.logging import LoggingConfig

Part = Literal[
    "data",
    "forward_backward",
    "gradient_sync",
    "optimizer",
    "forward_compute",
    "backward_compute",
    "pipeline_communication",
]

LEVELS: dict[Part, int] = {
    "data": 1,
    "forward_backward": 1,
    "gradient_sync": 1,
    "optimizer": 1,
    "forward_compute": 2,
    "backward_compute": 2,
    "pipeline_communication": 2,
}
"""Level from which on a part is timed.

- data: until this rank has its micro-batches.
- forward_backward: all micro-batches, ``gradient_sync`` included.
- gradient_sync: the sums of gradients that are left after the last backward; the rest runs beside backward.
- optimizer: norm, clipping and step, and the gathers of weights that it starts and waits for.
- forward_compute, backward_compute: the stages of the pipeline, with the communication of tp, cp and ep in them.
- pipeline_communication: messages between stages, with the wait for a stage that is not ready.
"""


class StepTimers:
    """One rank's timers, which add up the iterations since the last ``begin_interval``.

    Attributes:
        marks_parts: parts are marked in the trace of torch's profiler, which records at present.
    """

    def __init__(self, config: LoggingConfig, device: torch.device) -> None:
        """Set the level, and whether parts of level 1 begin with a barrier, by ``config``."""
        self._option = config.timing_log_option
        self._has_barrier = config.barrier_with_level_1_timing
        self._device = device
        self.marks_parts = False
        self._seconds = {part: 0.0 for part, level in LEVELS.items() if level <= config.timing_log_level}

    def measure(self, part: Part) -> AbstractContextManager[None]:
        """Time a part of the step, if the level has it.

        Collective for a timed part of level 1 with a barrier: all ranks of the job.
        """
        if self.marks_parts:
            return self._mark(part)
        return self._measure(part) if part in self._seconds else nullcontext()

    @contextmanager
    def _mark(self, part: Part) -> Iterator[None]:
        with record_function(part), self._measure(part) if part in self._seconds else nullcontext():
            yield

    @contextmanager
    def _measure(self, part: Part) -> Iterator[None]:
        if self._has_barrier and LEVELS[part] == 1 and dist.get_world_size() > 1:
            # A part does not contain the wait for ranks that are late with the part before.
            dist.barrier()
        self._wait_for_device()
        began = time.perf_counter()
        try:
            yield
        finally:
            self._wait_for_device()
            self._seconds[part] += time.perf_counter() - began

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def row(self, iterations: int) -> dict[str, dict[str, dict[str, float]]]:
        """The field ``timers_s`` of a row: of each part the seconds per iteration; empty with level 0.

        ``min`` and ``max`` over the ranks, or ``max``, or every rank by its number, as the config wants.

        Collective: all ranks of the job, if the level is not 0.
        """
        if not self._seconds:
            return {}
        own = torch.tensor(list(self._seconds.values()), dtype=torch.float64, device=self._device) / iterations
        of_all = own.new_empty(dist.get_world_size() * len(own))
        all_gather_single(of_all, own)
        by_rank = of_all.view(-1, len(own)).t().tolist()
        return {"timers_s": {part: self._shown(times) for part, times in zip(self._seconds, by_rank, strict=True)}}

    def _shown(self, times: list[float]) -> dict[str, float]:
        if self._option == "all":
            return {str(rank): seconds for rank, seconds in enumerate(times)}
        return {"max": max(times)} if self._option == "max" else {"min": min(times), "max": max(times)}

    def begin_interval(self) -> None:
        """Start from zero."""
        self._seconds = dict.fromkeys(self._seconds, 0.0)


def measured(timers: StepTimers | None, part: Part) -> AbstractContextManager[None]:
    """``timers.measure(part)``; nothing without timers."""
    return nullcontext() if timers is None else timers.measure(part)

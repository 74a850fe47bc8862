"""Pipeline schedules by the names of ``parallel.pipeline_schedule``."""

from __future__ import annotations

from functools import lru_cache

from trainer.planning.schedule.kinds import gpipe, interleaved_one_f_one_b, one_f_one_b
from trainer.planning.schedule.placement import ScheduleError, placement_of
from trainer.planning.schedule.table import PipelineSchedule
from trainer.planning.schedule.zero_bubble import zb_h1, zb_v


@lru_cache(maxsize=128)
def build_schedule(kind: str, pp: int, chunks: int, num_micro_batches: int) -> PipelineSchedule:
    """Build the table of a schedule.

    Args:
        kind: one of SCHEDULE_KINDS.
        pp: number of pipeline ranks, 1 or more.
        chunks: model chunks per rank; see default_chunks.
        num_micro_batches: micro-batches of one replica per iteration, 1 or more.

    Raises:
        ScheduleError: unknown schedule, or an invalid number of ranks, chunks or micro-batches.
    """
    placement_of(kind, pp, chunks)
    if num_micro_batches < 1:
        raise ScheduleError(f"a schedule needs at least one micro-batch, not {num_micro_batches}")
    if kind == "interleaved":
        return interleaved_one_f_one_b(pp, chunks, num_micro_batches)
    return {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1, "zb-v": zb_v}[kind](pp, num_micro_batches)

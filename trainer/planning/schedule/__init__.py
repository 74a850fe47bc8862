"""Pipeline schedules as tables: what each rank computes, in which order. Torch-free.

The executor runs a table, a planner can time it, a memory model can count its live activations, a drawing paints it. A
new schedule is one pure function that returns a table; what is sent between the ranks follows from the table
(``exchanges``), and ``check`` says whether it can run at all.
"""

from trainer.planning.schedule.catalogue import build_schedule
from trainer.planning.schedule.check import check, check_batches, suits_batches
from trainer.planning.schedule.kinds import all_forward, gpipe, interleaved_one_f_one_b, one_f_one_b
from trainer.planning.schedule.placement import SCHEDULE_KINDS, ScheduleError, default_chunks, placement_of
from trainer.planning.schedule.simulation import sends_under_way
from trainer.planning.schedule.table import (
    Action,
    ActionKind,
    ActivationBound,
    Exchange,
    Message,
    PipelineSchedule,
    exchanges,
    kept_activations,
    live_activations,
    message_count,
)
from trainer.planning.schedule.timeline import DurationOf, Durations, Timeline, timeline
from trainer.planning.schedule.zero_bubble import zb_h1, zb_v

__all__ = [
    "SCHEDULE_KINDS",
    "Action",
    "ActionKind",
    "ActivationBound",
    "DurationOf",
    "Durations",
    "Exchange",
    "Message",
    "PipelineSchedule",
    "ScheduleError",
    "Timeline",
    "all_forward",
    "build_schedule",
    "check",
    "check_batches",
    "default_chunks",
    "exchanges",
    "gpipe",
    "interleaved_one_f_one_b",
    "kept_activations",
    "live_activations",
    "message_count",
    "one_f_one_b",
    "placement_of",
    "sends_under_way",
    "suits_batches",
    "timeline",
    "zb_h1",
    "zb_v",
]

"""Pipeline schedules as tables of actions per rank. Torch-free.

The executor runs a table; ``timeline`` times it; ``live_activations`` counts its activations; draw.py draws it. A new
schedule is one pure function that returns a table. The messages between ranks follow from the table (``exchanges``),
and ``check`` refuses a table that cannot run.
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

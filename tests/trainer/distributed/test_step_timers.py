"""Timers of the parts of a step: nothing waits without them, and a row has the extremes over the ranks."""

import itertools
import time

import pytest
import torch
import torch.distributed as dist

from trainer.config.sections.logging import LoggingConfig
from trainer.distributed.step_timers import LEVELS, StepTimers

CPU = torch.device("cpu")


def measure(rank, _world_size, logging):
    """A row of two iterations by a clock on which everything takes ``rank + 1`` seconds; and the number of barriers."""
    clock, barriers, barrier = itertools.count(0, rank + 1), [], dist.barrier
    original, time.perf_counter = time.perf_counter, lambda: float(next(clock))
    dist.barrier = lambda: (barriers.append(None), barrier())
    try:
        timers = StepTimers(logging, CPU)
        for _ in range(2):
            for part in LEVELS:
                with timers.measure(part):
                    pass
    finally:
        time.perf_counter, dist.barrier = original, barrier
    row = timers.row(2)
    timers.begin_interval()
    later = timers.row(1)
    return row, later, len(barriers), next(clock)


LEVEL_1 = ["data", "forward_backward", "gradient_sync", "optimizer"]


@pytest.mark.parametrize(
    ("option", "shown"),
    [("minmax", {"min": 1.0, "max": 3.0}), ("max", {"max": 3.0}), ("all", {"0": 1.0, "1": 2.0, "2": 3.0})],
)
def test_a_row_has_the_times_of_the_ranks(ranks, option, shown):
    logging = LoggingConfig(timing_log_level=1, timing_log_option=option)
    for row, later, barriers, _ in ranks.run(measure, logging, world_size=3):
        assert row == {"timers_s": dict.fromkeys(LEVEL_1, shown)}
        assert later == {"timers_s": dict.fromkeys(LEVEL_1, dict.fromkeys(shown, 0.0))}
        assert barriers == 2 * len(LEVEL_1)


def test_level_2_has_all_parts_and_no_barrier_unless_asked(ranks):
    logging = LoggingConfig(timing_log_level=2, barrier_with_level_1_timing=False)
    for row, _, barriers, _ in ranks.run(measure, logging, world_size=2):
        assert list(row["timers_s"]) == list(LEVELS)
        assert barriers == 0


def test_level_0_reads_no_clock_and_sends_nothing(ranks):
    for row, _, barriers, ticks in ranks.run(measure, LoggingConfig(), world_size=2):
        assert (row, barriers, ticks) == ({}, 0, 0)


@pytest.mark.parametrize(("level", "waits"), [(0, 0), (1, 2)])
def test_only_a_timed_part_waits_for_a_gpu(monkeypatch, level, waits):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", calls.append)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    device = torch.device("cuda", 0)
    with StepTimers(LoggingConfig(timing_log_level=level), device).measure("optimizer"):
        pass
    assert calls == [device] * waits

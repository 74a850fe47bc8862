"""Shares of the time in which a rank does not wait for others."""

import threading

import torch

from trainer.process.heartbeat import Heartbeat
from trainer.training.busy_share import WINDOWS, BusyShare, busy_shares


def noted(answers, ticks, windows):
    """The shares after so many windows of 4 s, with a sample at each tick of a clock."""
    clock, answer = iter([0.0, *ticks]), iter(answers)
    found: list[tuple[float, ...]] = []
    ended = threading.Event()

    def note(shares):
        found.append(shares)
        if len(found) == windows:
            ended.set()

    with BusyShare(lambda: next(answer, True), note, window_s=4.0, clock=lambda: next(clock, 1e9)):
        assert ended.wait(60)
    return found[:windows]


def test_the_newest_windows_are_noted_oldest_first():
    answers = [False, False, True, True] * 2 + [False] * 4 * (WINDOWS - 1)
    found = noted(answers, map(float, range(1, 100)), WINDOWS + 1)
    assert found[:3] == [(0.5,), (0.5, 0.5), (0.5, 0.5, 1.0)]
    assert found[WINDOWS] == (0.5, 1.0, 1.0, 1.0)


def test_a_sample_after_a_pause_counts_for_the_pause():
    assert noted([True, False], [1.0, 4.0], 1) == [(0.75,)]


def test_a_wait_for_a_device_tells_nothing():
    with busy_shares(Heartbeat(None, 0), torch.device("cuda")) as shares:
        assert shares is None

"""Spikes of the loss are judged by the losses before them."""

import math

import pytest

from trainer.training.soundness.loss_spikes import LossSpikes

STEADY = [3.0 + 0.02 * (number % 5 - 2) for number in range(64)]


def judge(losses, loss, factor=6.0, window=64):
    recent = []
    spikes = LossSpikes(factor, window, recent)
    for each in losses:
        spikes.add(each)
    return spikes.judge(len(losses) + 1, loss)


@pytest.mark.parametrize(
    ("losses", "loss", "is_spike"),
    [
        (STEADY, 3.1, False),
        (STEADY, 3.5, True),
        (STEADY, 1.0, False),
        (STEADY, math.nan, False),
        (STEADY, math.inf, False),
        (STEADY[:31], 9.0, False),
        (STEADY[:32], 9.0, True),
        ([2.0] * 64, 2.11, False),
        ([2.0] * 64, 2.13, True),
        ([0.0] * 64, 0.0, False),
        ([*STEADY, 9.0, 9.0], 9.0, True),
        ([*STEADY, *[9.0] * 40], 9.0, False),
        ([10.0 - 0.1 * number for number in range(64)], 6.0, False),
        ([*STEADY[:40], *[math.nan] * 30], 3.5, True),
    ],
)
def test_a_loss_far_above_those_before_it_is_a_spike(losses, loss, is_spike):
    assert (judge(losses, loss) is not None) == is_spike


def test_the_sentence_has_what_it_was_judged_by():
    spike = judge([2.0] * 64, 9.0)
    assert str(spike) == (
        "the loss of iteration 65, 9, is a spike: the 64 losses before it have the median 2, and 2.12 is the limit "
        "(training.loss_spike_factor)"
    )


def test_a_run_without_a_spike_is_told_of_none():
    """10,000 losses of a fall with noise of 2%, by a generator of fixed seed: 0 are spikes at the default factor."""
    import random

    draw, recent = random.Random(0), []
    spikes = LossSpikes(6.0, 128, recent)
    found = 0
    for step in range(10_000):
        loss = (2.0 + 8.0 / (1 + step / 50)) * (1 + draw.gauss(0, 0.02))
        found += spikes.judge(step, loss) is not None
        spikes.add(loss)
    assert found == 0
    assert len(recent) == 128

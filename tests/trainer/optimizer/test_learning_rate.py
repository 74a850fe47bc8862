"""Megatron-LM's learning-rate curve, computed by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config.sections.optimizer import OptimizerConfig
from trainer.optimizer.learning_rate import learning_rate, weight_decay


def config(**keys):
    return OptimizerConfig(**{"lr": 1.0, "min_lr": 0.1, "lr_warmup_iters": 10, **keys})


@pytest.mark.parametrize(
    ("style", "step", "expected"),
    [
        ("cosine", 0, 0.0),
        ("cosine", 5, 0.5),
        ("cosine", 10, 1.0),
        ("cosine", 60, 0.55),
        ("cosine", 35, 0.1 + 0.9 * 0.5 * (math.cos(math.pi / 4) + 1)),
        ("cosine", 110, 0.1),
        ("cosine", 5000, 0.1),
        ("linear", 60, 0.55),
        ("linear", 109, 0.109),
        ("inverse-square-root", 40, 0.5),
        ("inverse-square-root", 111, 0.1),
        ("WSD", 70, 1.0),
        ("WSD", 90, 0.1 + 0.9 * (2 * 0.5**0.5 - 1)),
        ("WSD", 110, 0.1),
        ("constant", 5, 0.5),
        ("constant", 5000, 1.0),
    ],
)
def test_curve(style, step, expected):
    assert learning_rate(
        step, config(lr_decay_style=style, lr_decay_iters=110, lr_wsd_decay_iters=40), 500
    ) == pytest.approx(expected)


@pytest.mark.parametrize(("style", "share"), [("linear", 0.75), ("cosine", 0.5 + 0.5**1.5), ("minus_sqrt", 0.5)])
def test_the_decays_of_warmup_stable_decay(style, share):
    keys = {"lr_decay_style": "WSD", "lr_wsd_decay_style": style, "lr_wsd_decay_iters": 40, "lr_decay_iters": 110}
    assert learning_rate(80, config(**keys), 500) == pytest.approx(0.1 + 0.9 * share)


@pytest.mark.parametrize(("style", "share"), [("linear", 0.25), ("cosine", 0.5 - 0.5**1.5)])
def test_weight_decay_grows(style, share):
    keys = {"start_weight_decay": 0.1, "end_weight_decay": 0.5, "weight_decay_incr_style": style}
    assert weight_decay(25, config(**keys), 100) == pytest.approx(0.1 + 0.4 * share)
    assert weight_decay(101, config(**keys), 100) == 0.5
    assert weight_decay(25, config(weight_decay=0.3), 100) == 0.3


def test_warmup_starts_at_its_own_rate():
    assert learning_rate(0, config(lr_warmup_init=0.2), 100) == 0.2
    assert learning_rate(5, config(lr_warmup_init=0.2), 100) == pytest.approx(0.6)


def test_warmup_as_a_share_need_not_be_whole():
    shared = config(lr_warmup_iters=0, lr_warmup_fraction=0.25)
    assert learning_rate(1, shared, 10) == pytest.approx(0.4)
    assert learning_rate(3, shared, 10) == pytest.approx(0.1 + 0.9 * (1 - 0.5 / 7.5))


def test_decay_ends_with_training_by_default():
    assert learning_rate(100, config(), 100) == pytest.approx(0.1)
    assert learning_rate(0, config(lr_warmup_iters=0), 0) == 0.1  # nothing to train, nothing to divide by


@given(
    step=st.integers(0, 1000),
    warmup=st.integers(0, 50),
    decay=st.integers(51, 800),
    style=st.sampled_from(["constant", "linear", "cosine"]),
)
def test_always_within_bounds(step, warmup, decay, style):
    rate = learning_rate(step, config(lr_decay_style=style, lr_warmup_iters=warmup, lr_decay_iters=decay), 900)
    assert 0.0 <= rate <= 1.0
    if step > warmup:
        assert rate >= 0.1 - 1e-12

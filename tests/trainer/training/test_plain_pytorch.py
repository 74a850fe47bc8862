"""The trainer against a hand-written PyTorch loop on the benchmark's model, an independent reference."""

import argparse
import functools

import pytest

from benchmarks.train_speed import OURS, OURS_REFERENCE, run_once

STEPS = 3


@functools.cache
def curve(trainer: str, layout: str) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the first steps."""
    reports = run_once(trainer, layout, argparse.Namespace(model="tiny", warm_up=0, steps=STEPS))
    steps = list(zip(*(report["steps"] for report in reports), strict=True))
    losses = [next(rank["loss"] for rank in step if rank["loss"] is not None) for step in steps]
    return losses, [step[0]["grad_norm"] for step in steps]


@pytest.mark.parametrize(("trainer", "layout"), [(OURS, "1"), (OURS, "tp2"), (OURS_REFERENCE, "1")])
def test_loss_and_gradient_norm_are_those_of_plain_pytorch(trainer: str, layout: str) -> None:
    plain_losses, plain_norms = curve("plain", "1")
    losses, norms = curve(trainer, layout)
    assert losses == pytest.approx(plain_losses, abs=1e-5)
    # Our norm is exact to 1e-5. torch's own CPU norm, which the plain loop uses, adds a million float32 squares.
    assert norms == pytest.approx(plain_norms, rel=3e-4)


def test_plain_pytorch_agrees_with_other_frameworks() -> None:
    """First losses and norms of transformers, litgpt and megatron-core.

    On the same model, to five figures.
    """
    losses, norms = curve("plain", "1")
    assert losses == pytest.approx([8.42381, 8.00330, 7.75658], abs=2e-5)
    assert norms == pytest.approx([5.4584, 3.3555, 2.9519], abs=2e-4)

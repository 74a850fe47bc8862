"""Sizes of batches that grow, as Megatron-LM has them."""

from __future__ import annotations

import json

import pytest

from tests.record_batch_ramps import CASES, RECORD
from trainer.config.sections.batch_sizes import BatchSizes, can_grow
from trainer.planning.command_line import UsageError, parse_command_line

RAMPS = [json.loads(line) for line in RECORD.read_text().splitlines()]


def test_sizes_and_iterations_are_those_of_megatron() -> None:
    assert len(RAMPS) == CASES
    for case in RAMPS:
        sizes, iteration, consumed = BatchSizes(case["full"], tuple(case["ramp"])), 0, 0
        for size, count in case["sizes"]:
            for _ in range(count):
                assert (sizes.samples_after(iteration), sizes.at(consumed)) == (consumed, size), case
                assert sizes.iterations_reaching(consumed) == iteration
                assert sizes.iterations_reaching(consumed + 1) == iteration + 1
                iteration, consumed = iteration + 1, consumed + size
        assert [phase.samples for phase in sizes.phases] == [size for size, _ in case["sizes"]]
        for samples, iterations in case["iterations"]:
            assert sizes.iterations_of(samples) == iterations, (case, samples)


def test_without_a_ramp_every_batch_is_full() -> None:
    sizes = BatchSizes(8)
    assert [sizes.at(0), sizes.at(10**9), sizes.samples_after(5)] == [8, 8, 40]
    assert [sizes.iterations_of(41), sizes.iterations_reaching(41), sizes.iterations_reaching(0)] == [5, 6, 0]
    assert sizes.full_batches(16) == 2 and sizes.full_batches(20) == 2.5


@pytest.mark.parametrize("ramp", [(4, 4), (0, 4, 8), (4, 3, 8), (12, 4, 8), (4, 4, 8, 1), (4, -4, 8)])
def test_a_ramp_must_lead_to_the_full_batch(ramp: tuple[int, ...]) -> None:
    assert can_grow((4, 4, 8), 12)
    assert not can_grow(ramp, 12)


def test_a_ramp_of_very_many_samples_is_counted_at_once() -> None:
    sizes = BatchSizes(10**6, (1, 1, 10**12))
    assert not can_grow(sizes.ramp, sizes.full)
    sizes = BatchSizes(100_001, (1, 1, 10**12))
    assert can_grow(sizes.ramp, sizes.full)
    assert sizes.iterations_of(10**12) == pytest.approx(10**7 * 12, rel=0.02)


BLOOM = ["--rampup-batch-size", "192", "16", "9765625", "--global-batch-size", "2048", "--seq-length", "2048"]


def test_lengths_in_samples_are_converted_by_the_ramp() -> None:
    """The numbers of BLOOM-176B (bigscience, train/tr11-176B-ml)."""
    lengths = ["--train-samples", "220000000", "--lr-decay-samples", "200000000", "--lr-warmup-samples", "183105"]
    values = parse_command_line([*lengths, *BLOOM]).values
    sizes = BatchSizes(2048, (192, 16, 9_765_625))
    iterations = values["training.train_iters"]
    assert 220_000_000 - 2048 < sizes.samples_after(iterations) <= 220_000_000
    assert values["optimizer.lr_decay_iters"] == 97656.25
    assert values["optimizer.lr_warmup_iters"] == 183105 / 2048
    assert parse_command_line([*lengths[:2], *BLOOM]).values["optimizer.lr_decay_iters"] == 220_000_000 / 2048


def test_tokens_end_with_the_batch_that_reaches_them() -> None:
    values = parse_command_line(["--train-tokens", str(1000 * 2048 + 1), *BLOOM]).values
    assert values["training.train_iters"] == 6  # 5 x 192 = 960 samples are too few


def test_iterations_and_a_ramp_are_refused_as_by_megatron() -> None:
    with pytest.raises(UsageError, match="--rampup-batch-size: cannot be combined with --train-iters"):
        parse_command_line(["--train-iters", "8", *BLOOM])

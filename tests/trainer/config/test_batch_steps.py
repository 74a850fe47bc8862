"""Batch sizes in steps, as Megatron-LM's --step-batch-size-schedule has them."""

from __future__ import annotations

import random

import pytest

from trainer.config.sections.batch_sizes import BatchSizes, Phase, steps_of
from trainer.planning.command_line import UsageError, parse_command_line

LAST = "--step-batch-size-schedule"


def walked(steps: list[tuple[int, int]], samples: int) -> list[int]:
    """Sizes of the batches of a run of ``samples`` samples, one after the other, by the rule of Megatron-LM."""
    sizes: list[int] = []
    while sum(sizes) < samples:
        sizes.append([size for first, size in steps if first <= sum(sizes)][-1])
    return sizes


def test_sizes_and_iterations_are_those_of_one_batch_after_the_other() -> None:
    draw = random.Random(5)
    for _ in range(150):
        firsts = [0, *sorted(draw.sample(range(1, 400), draw.randint(0, 6)))]
        steps = [(first, draw.randint(1, 60)) for first in firsts]
        length = draw.randint(1, 50)
        entries = [f"{first * length + draw.randrange(length)}:{size}" for first, size in steps]
        draw.shuffle(entries)
        assert steps_of(draw.choice([" ", ",", ", "]).join(entries), length) == tuple(steps)
        sizes, samples = BatchSizes(steps[-1][1], (), tuple(steps)), draw.randint(1, 800)
        expected = walked(steps, samples)
        assert sizes.iterations_of(samples) == sizes.iterations_reaching(samples) == len(expected), (steps, samples)
        for iteration, size in enumerate(expected):
            consumed = sum(expected[:iteration])
            assert (sizes.samples_after(iteration), sizes.at(consumed)) == (consumed, size), (steps, iteration)
        assert sizes.largest == max(size for _, size in steps)


def test_a_step_that_the_batch_before_passes_is_skipped() -> None:
    sizes = BatchSizes(2, (), ((0, 8), (3, 4), (5, 6), (8, 2)))
    assert sizes.phases == (Phase(0, 0, 8), Phase(1, 8, 2))
    assert not sizes.are_constant


def test_numbers_have_the_suffixes_and_the_rounding_of_megatron() -> None:
    text = "0:768 250B:1536 0.5t:3.072K 750b:6144"
    assert steps_of(text, 4096) == ((0, 768), (61_035_156, 1536), (122_070_312, 3072), (183_105_468, 6144))
    assert steps_of("1M:4,0:2", 3) == ((0, 2), (333_333, 4))


LENGTHS = ["--train-samples", "100", "--lr-warmup-samples", "30", "--seq-length", "32"]


def test_lengths_in_samples_are_converted_by_the_steps() -> None:
    values = parse_command_line([*LENGTHS, LAST, "0:4 320:12 1K:8"]).values
    assert values["training.step_batch_size_schedule"] == "0:4 320:12 1K:8"
    assert values["training.train_iters"] == len(walked([(0, 4), (10, 12), (31, 8)], 100))
    assert (values["optimizer.lr_decay_iters"], values["optimizer.lr_warmup_iters"]) == (100 / 8, 30 / 8)
    given = parse_command_line([*LENGTHS, "--lr-decay-samples", "64", LAST, "0:4 320:12 1K:8"]).values
    assert given["optimizer.lr_decay_iters"] == 8


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--train-iters", "8", "--seq-length", "32", LAST, "0:4"], f"{LAST}: cannot be combined with --train-iters"),
        (["--train-samples", "8", LAST, "0:4"], f"{LAST}: is converted to iterations, which needs --seq-length"),
        ([*LENGTHS, LAST, "0:4 8"], f"{LAST}: '8' is not a valid step; write TOKENS:SIZE"),
    ],
)
def test_flags_that_cannot_be_converted_are_refused(flags: list[str], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_command_line(flags)
    assert str(caught.value).startswith(says)

"""Every way of dividing the work computes the same: a covering subset of tests.parity, and proof that it can fail.

The subset has each axis alone, each pair of axes, all three together, every model, and as many micro-batches as stages,
fewer and more. ``make parity`` runs all layouts with all models.
"""

from dataclasses import replace

import pytest

from tests.trainer.layout_parity import (
    CASES,
    CURVES,
    SERIAL,
    SIXTEEN_BIT,
    Layout,
    deviation,
    problems,
    run_layout,
)
from tests.trainer.spawn import RankError, Ranks

GPT2, LLAMA, QWEN = CASES

SUBSET = [
    (GPT2, Layout(tp=2)),
    (GPT2, Layout(tp=4, sequence_parallel=True)),
    (GPT2, Layout(pp=4)),
    (GPT2, Layout(dp=4)),
    (GPT2, Layout(tp=2, pp=2)),
    (GPT2, Layout(pp=2, dp=2)),
    (GPT2, Layout(tp=2, pp=2, dp=2, sequence_parallel=True)),
    (LLAMA, Layout(tp=4)),
    (LLAMA, Layout(tp=2, sequence_parallel=True)),
    (LLAMA, Layout(pp=2)),
    (LLAMA, Layout(pp=4)),
    (LLAMA, Layout(dp=2)),
    (LLAMA, Layout(tp=2, pp=2, dp=2)),
    (QWEN, Layout(tp=2, dp=2, sequence_parallel=True)),
    (QWEN, Layout(pp=2, dp=2)),
    (QWEN, Layout(pp=4, dp=2)),
    (QWEN, Layout(tp=4, sequence_parallel=True)),
]


@pytest.fixture(scope="module")
def ranks():
    with Ranks(8) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def serial(ranks):
    """The serial run of a case, computed once."""
    outcomes = {}

    def outcome(case):
        if case.name not in outcomes:
            outcomes[case.name] = run_layout(ranks, case, SERIAL)
        return outcomes[case.name]

    return outcome


@pytest.mark.parametrize(("case", "layout"), SUBSET, ids=str)
def test_loss_gradients_and_step_equal_the_serial_run(ranks, serial, case, layout):
    found = deviation(serial(case), run_layout(ranks, case, layout))
    assert not problems(case, found), str(found)


@pytest.mark.parametrize("case", CURVES, ids=str)
@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2, sequence_parallel=True), Layout(pp=2, dp=2)], ids=str)
def test_ten_adam_steps_give_the_same_curve(ranks, serial, case, layout):
    curve = run_layout(ranks, case, layout)
    assert len(set(curve.losses)) == 10
    found = deviation(serial(case), curve)
    assert not problems(case, found), str(found)


@pytest.mark.parametrize("case", SIXTEEN_BIT, ids=str)
@pytest.mark.parametrize("layout", [Layout(tp=2, sequence_parallel=True), Layout(pp=2, dp=2)], ids=str)
def test_16_bit_training_stays_within_its_bounds(ranks, serial, case, layout):
    found = deviation(serial(case), run_layout(ranks, case, layout))
    assert not problems(case, found), str(found)


@pytest.mark.parametrize("case", SIXTEEN_BIT, ids=str)
def test_16_bit_training_is_close_to_32_bit(serial, case):
    in_full = replace(case, name=f"{case}-in-32", training={})
    found = deviation(serial(in_full), serial(case))
    assert not problems(case, found), str(found)


def no_norm_sum(model, _optimizer, _options):
    layouts = model.gradients._layouts
    layouts.update({name: replace(layout, partial_over_tp=False) for name, layout in layouts.items()})


def no_tied_sum(model, _optimizer, _options):
    layouts = model.gradients._layouts
    layouts.update({name: replace(layout, tied_over_stages=False) for name, layout in layouts.items()})


def no_sum_over_replicas(model, _optimizer, _options):
    for bucket in model.gradients._buckets:
        bucket.group = None


def divided_by_micro_batches_too(_model, _optimizer, options):
    options["loss_scale"] /= len(options["micro_batches"])


def divided_by_this_replicas_tokens(model, _optimizer, options):
    masks = [batch.loss_mask for batch in options["micro_batches"]]
    options["valid_tokens"] = sum(int(mask.sum()) for mask in masks) * model.mesh.dp


def dropout_by_local_number(_model, _optimizer, options):
    options["micro_batches"] = [replace(b, index=i) for i, b in enumerate(options["micro_batches"])]


def clipped_per_stage(model, optimizer, _options):
    optimizer._norm._model = replace(model, mesh=replace(model.mesh, tp=1, pp=1, dp=1, rank=0))


@pytest.mark.parametrize(
    ("layout", "mutation", "symptom"),
    [
        (Layout(tp=2, sequence_parallel=True), no_norm_sum, "copies of gradient of .*position.* differ"),
        (Layout(pp=2), no_tied_sum, "copies of gradient of .*embedding.* differ"),
        (Layout(dp=2), no_sum_over_replicas, "ranks disagree|copies of gradient of .* differ"),
        (Layout(pp=2), divided_by_micro_batches_too, "gradient is off by 7"),
        (Layout(dp=2), divided_by_this_replicas_tokens, "gradient is off by"),
        (Layout(dp=2), dropout_by_local_number, "loss is off by"),
        (Layout(pp=2), clipped_per_stage, "ranks disagree about the gradient's norm"),
    ],
    ids=lambda value: str(value) if isinstance(value, Layout) else getattr(value, "__name__", ""),
)
def test_a_broken_trainer_is_caught(ranks, serial, layout, mutation, symptom):
    """Each mutation is a bug that some trainer has had."""
    with pytest.raises(AssertionError, match=symptom) as caught:
        found = problems(GPT2, deviation(serial(GPT2), run_layout(ranks, GPT2, layout, mutation)))
        assert not found, "; ".join(found)
    assert not isinstance(caught.value, RankError), "the mutation crashed instead of giving wrong numbers"

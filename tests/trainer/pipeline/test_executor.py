"""Pipelines beyond the parity array: evaluation, logits, unlike shapes, memory, and schedules of one rank."""

from datetime import timedelta

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.trainer.parity.layout_parity import compare, problems, run_case, train
from tests.trainer.parity.parity_case import VOCAB_SIZE, Case
from tests.trainer.spawn import DEADLINE_S
from trainer.data.samples.micro_batch import MicroBatch
from trainer.distributed.mesh import ParallelMesh, build_process_groups
from trainer.distributed.random_streams import StepRandomness
from trainer.parallel_model import build_model
from trainer.pipeline.executor import forward_backward, forward_logits, forward_only


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zb-v"])
def test_schedules_of_a_single_rank(ranks, serials, schedule):
    """All messages stay on the rank itself; the sums are the same."""
    case = Case(model="llama", schedule=schedule, micro_batches=3)
    assert problems(case, compare(ranks, serials, case)) == []


def build(rank, world_size, case):
    config = case.config()
    mesh = ParallelMesh.build(config, rank, world_size)
    groups = build_process_groups(mesh, timedelta(seconds=DEADLINE_S))
    return build_model(config, VOCAB_SIZE, mesh, groups, torch.device("cpu"))


EVALUATED = (16, 5)
"""Lengths of text: the training length, and one that no number of ranks divides."""


def evaluate(rank, world_size, case):
    model = build(rank, world_size, case)
    mesh = model.mesh
    loss_sum = forward_only(model, case.batch(0)[mesh.dp_rank :: mesh.dp])
    logits = [forward_logits(model, case.batch(0)[0].tokens[:, :length]) for length in EVALUATED]
    counted = mesh.computes_loss and mesh.tp_rank == 0
    assert mesh.computes_loss or not float(loss_sum)
    assert all((found is None) == (not mesh.computes_loss) for found in logits)
    return float(loss_sum), counted, [found.numpy() for found in logits if found is not None]


@pytest.mark.parametrize(
    "case",
    [
        Case(model="gpt2", tp=4),
        Case(model="qwen", tp=4),
        Case(model="qwen", tp=2, sp=True),
        Case(model="gpt2", pp=4),
        Case(model="qwen", tp=2, pp=2, sp=True),
        Case(model="gpt2", pp=2, dp=2, micro_batches=2),
        Case(model="gpt2", pp=2, schedule="interleaved", micro_batches=5),
        Case(model="qwen", pp=3, schedule="zb-v"),
        Case(model="llama", pp=2, tp=2, schedule="zb-v", micro_batches=3),
        Case(model="llama", cp=2),
        Case(model="gpt2", cp=2, pp=2),
        Case(model="llama", cp=2, tp=2, sp=True),
        Case(model="qwen", cp=2, tp=2, sp=True, cp_comm="a2a"),
        Case(model="capacity", tp=2, cp=2, sp=True),
    ],
    ids=str,
)
def test_evaluation_and_logits_equal_one_process(ranks, case):
    serial = case.serial
    [(expected, _, expected_logits)] = ranks.run(evaluate, serial, world_size=1)
    tokens = case.valid_tokens(0)
    assert [logits.shape for logits in expected_logits] == [(2, length, VOCAB_SIZE) for length in EVALUATED]
    results = ranks.run(evaluate, case, world_size=case.world_size)
    assert sum(loss for loss, counted, _ in results if counted) / tokens == pytest.approx(expected / tokens, abs=1e-5)
    assert any(logits for *_, logits in results)
    for *_, logits in results:
        for found, whole in zip(logits, expected_logits, strict=bool(logits)):
            np.testing.assert_allclose(found, whole, atol=1e-5)


def logits_of(rank, world_size, case, length):
    tokens = case.batch(0)[0].tokens
    model = build(rank, world_size, case)
    return forward_logits(model, tokens[:, :length]).numpy()


def test_full_experts_drop_no_token_outside_of_training(ranks):
    """Otherwise the end of a text could change its beginning.

    A later token could take an earlier one's place.
    """
    case = Case(model="capacity")
    [whole], [part] = (ranks.run(logits_of, case, length, world_size=1) for length in (16, 5))
    np.testing.assert_allclose(whole[:, :5], part, atol=1e-5)


LENGTHS = (16, 8, 4, 16, 12)


def train_on_unlike_lengths(rank, world_size, case):
    model = build(rank, world_size, case)
    batch = [
        MicroBatch(whole.tokens[:rows, :length], whole.labels[:rows, :length], index=whole.index)
        for whole, length, rows in zip(case.batch(0), LENGTHS, (2, 2, 1, 1, 2), strict=True)
    ]
    randomness = StepRandomness(seed=1, iteration=0)
    loss = forward_backward(model, batch, valid_tokens=92, loss_scale=1.0, randomness=randomness)
    evaluated = forward_only(model, batch)
    gradients = {shard.name: shard.gradient.numpy().copy() for shard in model.gradients.parameter_shards}
    return model.mesh.computes_loss, float(loss), float(evaluated), gradients


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_micro_batches_of_unlike_shapes_pass_through_a_pipeline(ranks, schedule):
    case = Case(model="llama", pp=2, schedule=schedule, micro_batches=len(LENGTHS))
    [(_, loss, evaluated, gradients)] = ranks.run(train_on_unlike_lengths, case.serial, world_size=1)
    seen = set()
    for computes_loss, *found, part in ranks.run(train_on_unlike_lengths, case, world_size=2):
        assert found == ([loss, evaluated] if computes_loss else [0.0, 0.0])
        assert all(np.array_equal(gradient, gradients[name]) for name, gradient in part.items())
        seen |= set(part)
    assert seen == set(gradients)


def step(model, case):
    randomness = StepRandomness(seed=1, iteration=0)
    return forward_backward(model, case.batch(0), valid_tokens=7, loss_scale=1.0, randomness=randomness)


def evaluate_between_steps(rank, world_size, case, evaluates):
    model = build(rank, world_size, case)
    if evaluates:
        forward_only(model, case.batch(1))
        forward_logits(model, case.batch(1)[0].tokens)
    loss = step(model, case)
    return float(loss), {shard.name: shard.gradient.numpy().copy() for shard in model.gradients.parameter_shards}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_evaluation_does_not_change_training(ranks, schedule):
    case = Case(model="gpt2", tp=2, pp=2, sp=True, schedule=schedule)
    undisturbed, disturbed = (ranks.run(evaluate_between_steps, case, flag) for flag in (False, True))
    for (loss, gradients), (other_loss, other_gradients) in zip(undisturbed, disturbed, strict=True):
        assert loss == other_loss
        assert all(np.array_equal(gradients[name], other_gradients[name]) for name in gradients)


def outputs_alive(rank, world_size, case):
    """Maximum of this rank's live outputs at the end of any forward."""
    model = build(rank, world_size, case)
    outputs, counts = [], []

    def count(_module, _inputs, output):
        outputs.append(StorageWeakRef(output.untyped_storage()))
        counts.append(sum(not reference.expired() for reference in outputs))

    for chunk in model.chunks:
        chunk.register_forward_hook(count)
    step(model, case)
    assert len(counts) == case.micro_batches * case.chunks
    return max(counts)


def test_outputs_are_freed_when_they_have_been_sent(ranks):
    """A rank that runs ahead keeps graphs, not outputs.

    The first of four ranks runs four micro-batches ahead.
    """
    assert max(ranks.run(outputs_alive, Case(model="llama", pp=4, micro_batches=6))) <= 3


def accumulators_before_and_after(rank, world_size, case):
    model = build(rank, world_size, case)
    modules = [module for chunk in model.chunks for module in chunk.modules()]
    modules = [module for module in modules if hasattr(module, "gradient_accumulator")]
    before = [module.gradient_accumulator for module in modules]
    step(model, case)
    return len(modules), all(
        module.gradient_accumulator is accumulator for module, accumulator in zip(modules, before, strict=True)
    )


def test_the_queues_are_removed_after_a_step(ranks):
    for count, unchanged in ranks.run(accumulators_before_and_after, Case(pp=2, schedule="zb-v"), world_size=2):
        assert count > 4
        assert unchanged


@pytest.mark.parametrize("case", [Case(tp=2, pp=2, sp=True), Case(model="gpt2", tp=2, dp=2)], ids=str)
def test_the_same_layout_gives_the_same_bits_twice(ranks, case):
    first, second = (ranks.run(train, case) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.losses == other.losses
        assert one.grad_norms == other.grad_norms
        for name, held in one.held.items():
            assert np.array_equal(held.gradient, other.held[name].gradient)


def test_a_zero_bubble_schedule_gives_the_bits_of_1f1b(ranks):
    """Deferred products use the same factors in the same order."""
    one, other = (run_case(ranks, Case(model="gpt2", pp=2, tp=2, schedule=kind)) for kind in ("1f1b", "zb-h1"))
    for of_one, of_other in zip(one.iterations, other.iterations, strict=True):
        assert of_one.loss == of_other.loss
        for name, gradient in of_one.gradient.items():
            assert np.array_equal(gradient, of_other.gradient[name]), name

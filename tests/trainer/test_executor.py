"""Evaluation and logits on every kind of layout equal one process, and leave training as it was."""

from datetime import timedelta

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.trainer.layout_parity import CASES, SERIAL, Layout, train, valid_tokens
from tests.trainer.spawn import DEADLINE_S, Ranks
from trainer.mesh import ParallelMesh, build_process_groups
from trainer.pipeline.executor import forward_backward, forward_logits, forward_only
from trainer.random_streams import StepRandomness
from trainer.train_state import build_model

GPT2, LLAMA, QWEN = CASES


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as ranks:
        yield ranks


def build(rank, world_size, case, layout):
    config = case.config(layout)
    mesh = ParallelMesh.build(config, rank, world_size)
    groups = build_process_groups(mesh, timedelta(seconds=DEADLINE_S))
    return build_model(config, case.vocab_size, mesh, groups, torch.device("cpu"))


def evaluate(rank, world_size, case, layout, length):
    model = build(rank, world_size, case, layout)
    mesh = model.mesh
    loss_sum, tokens = forward_only(model, case.batch(0)[mesh.dp_rank :: mesh.dp])
    logits = forward_logits(model, case.batch(0)[0].tokens[:, :length])
    counted = mesh.computes_loss and mesh.tp_rank == 0
    assert counted or mesh.computes_loss or not float(loss_sum)
    assert (logits is None) == (not mesh.computes_loss)
    return float(loss_sum), tokens, counted, None if logits is None else logits.numpy()


@pytest.mark.parametrize("length", [16, 5])
@pytest.mark.parametrize("case", [GPT2, QWEN], ids=str)
@pytest.mark.parametrize(
    "layout",
    [Layout(tp=4), Layout(tp=2, sequence_parallel=True), Layout(pp=4), Layout(tp=2, pp=2, sequence_parallel=True)]
    + [Layout(dp=2), Layout(pp=2, dp=2)],
    ids=str,
)
def test_evaluation_and_logits_equal_one_process(ranks, case, layout, length):
    [(expected, tokens, _, expected_logits)] = ranks.run(evaluate, case, SERIAL, length, world_size=1)
    assert tokens == valid_tokens(case, 0)
    assert expected_logits.shape == (case.micro_batch_size, length, case.vocab_size)
    results = ranks.run(evaluate, case, layout, length, world_size=layout.world_size)
    counted = [result for result in results if result[2]]
    assert sum(count for _, count, _, _ in counted) == tokens
    assert sum(loss for loss, _, _, _ in counted) / tokens == pytest.approx(expected / tokens, abs=1e-5)
    for *_, logits in results:
        if logits is not None:
            np.testing.assert_allclose(logits, expected_logits, atol=1e-5)


def evaluate_between_steps(rank, world_size, case, layout, evaluates):
    model = build(rank, world_size, case, layout)
    if evaluates:
        forward_only(model, case.batch(1))
        forward_logits(model, case.batch(1)[0].tokens)
    loss = forward_backward(
        model,
        case.batch(0),
        valid_tokens=valid_tokens(case, 0),
        loss_scale=1.0,
        randomness=StepRandomness(seed=1, iteration=0),
    )
    return float(loss), {name: model.gradients.main_grad(name).clone().numpy() for name in model.parameters}


def test_evaluation_leaves_no_trace_in_training(ranks):
    layout = Layout(tp=2, pp=2, sequence_parallel=True)
    undisturbed, disturbed = (ranks.run(evaluate_between_steps, GPT2, layout, flag) for flag in (False, True))
    for (loss, gradients), (other_loss, other_gradients) in zip(undisturbed, disturbed, strict=True):
        assert loss == other_loss
        assert all(np.array_equal(gradients[name], other_gradients[name]) for name in gradients)


def outputs_alive(rank, world_size, case, layout):
    """Most outputs of this stage that were in memory at the end of any of its forwards."""
    model = build(rank, world_size, case, layout)
    outputs, counts = [], []

    def count(_module, _inputs, output):
        outputs.append(StorageWeakRef(output.untyped_storage()))
        counts.append(sum(not reference.expired() for reference in outputs))

    model.chunks[0].register_forward_hook(count)
    forward_backward(
        model, case.batch(0), valid_tokens=1, loss_scale=1.0, randomness=StepRandomness(seed=1, iteration=0)
    )
    assert len(counts) == case.micro_batches
    return max(counts)


def test_outputs_are_freed_when_they_have_been_sent(ranks):
    """The first of four stages runs four micro-batches ahead; it keeps their graphs, not their outputs."""
    assert max(ranks.run(outputs_alive, LLAMA, Layout(pp=4))) <= 3


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2, sequence_parallel=True), Layout(tp=2, dp=2)], ids=str)
def test_the_same_layout_gives_the_same_bits_twice(ranks, layout):
    first, second = (ranks.run(train, GPT2, layout) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.loss_sums == other.loss_sums
        assert one.grad_norms == other.grad_norms
        assert all(np.array_equal(part.gradient, other.parts[name].gradient) for name, part in one.parts.items())

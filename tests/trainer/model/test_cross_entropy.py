"""Vocabulary-parallel cross entropy against torch's own, divided over one to four ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.trainer.spawn import Ranks
from trainer.model.tensor_parallel.collectives import TensorParallel
from trainer.model.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from trainer.ops.loss_terms import LossTerms


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as ranks:
        yield ranks


def make(vocab_size, dtype, scale=3.0):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(7, 3, vocab_size, generator=generator) * scale).to(dtype)
    labels = torch.randint(0, vocab_size, (7, 3), generator=generator)
    weights = torch.rand(7, 3, generator=generator) * (torch.rand(7, 3, generator=generator) < 0.7)
    return logits, labels, weights


def reference(vocab_size, dtype, scale=3.0):
    logits, labels, weights = make(vocab_size, dtype, scale)
    logits = logits.double().requires_grad_()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    (losses * weights).sum().backward()
    return losses.detach(), logits.grad


def divided(rank, world_size, vocab_size, padded, dtype, scale=3.0):
    """Losses, this rank's gradient without padding, and the largest gradient of the padding."""
    group = dist.group.WORLD if world_size > 1 else None
    tp = TensorParallel(world_size, rank, group)
    logits, labels, weights = make(vocab_size, dtype, scale)
    width = padded // world_size
    # The contents of the padding must not matter, however large.
    whole = F.pad(logits, (0, padded - vocab_size), value=1e4)
    local = whole[..., rank * width : (rank + 1) * width].clone().requires_grad_()
    num_valid = min(max(vocab_size - rank * width, 0), width)
    losses = vocab_parallel_cross_entropy(local * 1, labels, vocab_size, tp)
    (losses * weights).sum().backward()
    grad = local.grad
    return losses.detach(), grad[..., :num_valid], float(grad[..., num_valid:].abs().sum())


@pytest.mark.parametrize(
    ("world_size", "vocab_size", "padded"),
    [(1, 13, 13), (1, 13, 16), (2, 12, 12), (2, 13, 16), (4, 13, 16), (4, 5, 32), (4, 8, 16), (4, 1, 4)],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_the_serial_loss(ranks, world_size, vocab_size, padded, dtype):
    expected_losses, expected_grad = reference(vocab_size, dtype)
    results = ranks.run(divided, vocab_size, padded, dtype, world_size=world_size)
    stat_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    for losses, _, padding in results:
        assert losses.dtype == stat_dtype
        torch.testing.assert_close(losses.double(), expected_losses, atol=2e-6, rtol=0)
        assert padding == 0.0
    grad = torch.cat([part for _, part, _ in results], -1)
    assert grad.dtype == dtype
    # At most two roundings in the precision of the logits: of the probability, and of probability - 1 at the label.
    bound = 2e-6 if dtype in (torch.float64, torch.float32) else 1.5 * torch.finfo(dtype).eps
    torch.testing.assert_close(grad.double(), expected_grad, atol=bound, rtol=0)


@pytest.mark.parametrize("world_size", [1, 4])
def test_extreme_logits_stay_finite(ranks, world_size):
    expected_losses, expected_grad = reference(16, torch.float32, 1e4)
    results = ranks.run(divided, 16, 16, torch.float32, 1e4, world_size=world_size)
    torch.testing.assert_close(results[0][0].double(), expected_losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        torch.cat([part for _, part, _ in results], -1).double(), expected_grad, atol=1e-6, rtol=0
    )


def capped(rank, world_size, softcap):
    """Losses and this rank's gradient of logits under a softcap; 13 words in 16 columns."""
    tp = TensorParallel(world_size, rank, dist.group.WORLD if world_size > 1 else None)
    logits, labels, weights = make(13, torch.float32, 5.0)
    width = 16 // world_size
    local = F.pad(logits, (0, 3), value=1e4)[..., rank * width : (rank + 1) * width].clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(local * 1, labels, 13, tp, terms=LossTerms(softcap=softcap))
    (losses * weights).sum().backward()
    return losses.detach(), local.grad


@pytest.mark.parametrize("softcap", [1.5, 30.0])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_fused_cross_entropy_applies_the_softcap(ranks, world_size, softcap):
    """A trainer that caps only the logits of evaluation trains another model, without an error."""
    logits, labels, weights = make(13, torch.float32, 5.0)
    logits = logits.double().requires_grad_()
    values = softcap * torch.tanh(logits / softcap)
    expected = F.cross_entropy(values.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    (expected * weights).sum().backward()
    results = ranks.run(capped, softcap, world_size=world_size)
    for losses, _ in results:
        torch.testing.assert_close(losses.double(), expected.detach(), rtol=2e-6, atol=2e-6)
    grad = torch.cat([part for _, part in results], -1)
    assert not grad[..., 13:].any()
    torch.testing.assert_close(grad[..., :13].double(), logits.grad, rtol=1e-5, atol=2e-6)


def masked(rank, world_size, kind, dtype):
    """Losses and this rank's gradient for logits of +-10000 with few valid tokens.

    The vocabulary has 5 words in 8 columns.
    """
    tp = TensorParallel(world_size, rank, dist.group.WORLD if world_size > 1 else None)
    logits, labels, weights = extremes(kind, dtype)
    width = 8 // world_size
    local = F.pad(logits, (0, 3), value=1e4)[..., rank * width : (rank + 1) * width].clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(local * 1, labels, 5, tp)
    (losses * weights).sum().backward()
    return losses.detach(), local.grad


def extremes(kind, dtype):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randint(0, 2, (6, 2, 5), generator=generator) * 2e4 - 1e4
    logits[0] = -1e4  # a token with equal logits
    labels = torch.randint(0, 5, (6, 2), generator=generator)
    weights = torch.zeros(6, 2)
    if kind == "one":
        weights[4, 1] = 0.25
    elif kind == "first":
        weights[0] = 1.0
    return logits.to(dtype), labels, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["none", "one", "first"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_few_or_no_tokens_under_the_loss(ranks, world_size, kind, dtype):
    logits, labels, weights = extremes(kind, dtype)
    logits = logits.double().requires_grad_()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    (expected * weights).sum().backward()
    results = ranks.run(masked, kind, dtype, world_size=world_size)
    for losses, _ in results:
        torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    grad = torch.cat([part for _, part in results], -1)
    assert not grad[..., 5:].any()
    assert torch.equal(grad[weights == 0], torch.zeros_like(grad[weights == 0]))
    torch.testing.assert_close(grad[..., :5].double(), logits.grad, atol=torch.finfo(dtype).eps, rtol=0)


def test_more_rows_than_one_chunk():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(50, 2, 12000, generator=generator)
    labels = torch.randint(0, 12000, (50, 2), generator=generator)
    expected = logits.double().requires_grad_()
    F.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 0.01)):
        local = logits.clone().to(dtype).requires_grad_()
        vocab_parallel_cross_entropy(local * 1, labels, 12000, TensorParallel()).sum().backward()
        torch.testing.assert_close(local.grad.double(), expected.grad, atol=bound, rtol=0)


def test_the_logits_become_their_gradient():
    logits = torch.randn(4, 2, 9, requires_grad=True) * 1
    handed = []
    logits.register_hook(lambda gradient: handed.append(gradient.data_ptr()))
    losses = vocab_parallel_cross_entropy(logits, torch.zeros(4, 2, dtype=torch.int64), 9, TensorParallel())
    losses.sum().backward(retain_graph=True)
    assert handed == [logits.data_ptr()]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()

"""Vocabulary-parallel cross entropy against torch's own, divided over one to four ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from trainer.model.tensor_parallel.collectives import TensorParallel
from trainer.model.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from trainer.ops.loss_terms import LossTerms


def drawn(vocab_size, dtype=torch.float32, scale=3.0):
    """Logits, labels and weights, of which about a third are zero."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(7, 3, vocab_size, generator=generator) * scale).to(dtype)
    labels = torch.randint(0, vocab_size, (7, 3), generator=generator)
    weights = torch.rand(7, 3, generator=generator) * (torch.rand(7, 3, generator=generator) < 0.7)
    return logits, labels, weights


def extremes(kind, dtype):
    """Logits of +-10000 with few tokens under the loss."""
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


def expected_of(given, softcap=None):
    """Losses and gradient of torch's cross entropy in float64."""
    logits, labels, weights = given
    logits = logits.double().requires_grad_()
    values = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(values.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    (losses * weights).sum().backward()
    return losses.detach(), logits.grad


def divided(rank, world_size, draw, arguments, padded, softcap=None):
    """Losses, and this rank's gradient of its columns of the logits."""
    tp = TensorParallel(world_size, rank, dist.group.WORLD if world_size > 1 else None)
    logits, labels, weights = draw(*arguments)
    vocab_size, width = logits.shape[-1], padded // world_size
    # The contents of the padding must not matter, however large.
    whole = F.pad(logits, (0, padded - vocab_size), value=1e4)
    local = whole[..., rank * width : (rank + 1) * width].clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(local * 1, labels, vocab_size, tp, terms=LossTerms(softcap=softcap))
    (losses * weights).sum().backward()
    return losses.detach(), local.grad


def found_on(ranks, world_size, draw, arguments, padded, softcap=None):
    """Losses, the same on all ranks, and the whole gradient, which is zero in the padding."""
    results = ranks.run(divided, draw, arguments, padded, softcap, world_size=world_size)
    assert all(torch.equal(losses, results[0][0]) for losses, _ in results)
    grad = torch.cat([part for _, part in results], -1)
    vocab_size = draw(*arguments)[0].shape[-1]
    assert not grad[..., vocab_size:].any()
    return results[0][0], grad[..., :vocab_size]


@pytest.mark.parametrize(
    ("world_size", "vocab_size", "padded"),
    [(1, 13, 13), (1, 13, 16), (2, 12, 12), (2, 13, 16), (4, 13, 16), (4, 5, 32), (4, 8, 16), (4, 1, 4)],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_the_serial_loss(ranks, world_size, vocab_size, padded, dtype):
    expected_losses, expected_grad = expected_of(drawn(vocab_size, dtype))
    losses, grad = found_on(ranks, world_size, drawn, (vocab_size, dtype), padded)
    assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert grad.dtype == dtype
    torch.testing.assert_close(losses.double(), expected_losses, atol=2e-6, rtol=0)
    # At most two roundings in the precision of the logits: of the probability, and of probability - 1 at the label.
    bound = 2e-6 if dtype in (torch.float64, torch.float32) else 1.5 * torch.finfo(dtype).eps
    torch.testing.assert_close(grad.double(), expected_grad, atol=bound, rtol=0)


@pytest.mark.parametrize("world_size", [1, 4])
def test_extreme_logits_stay_finite(ranks, world_size):
    given = (16, torch.float32, 1e4)
    expected_losses, expected_grad = expected_of(drawn(*given))
    losses, grad = found_on(ranks, world_size, drawn, given, 16)
    torch.testing.assert_close(losses.double(), expected_losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad.double(), expected_grad, atol=1e-6, rtol=0)


@pytest.mark.parametrize("softcap", [1.5, 30.0])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_fused_cross_entropy_applies_the_softcap(ranks, world_size, softcap):
    """A trainer that caps only the logits of evaluation trains another model, without an error."""
    given = (13, torch.float32, 5.0)
    expected_losses, expected_grad = expected_of(drawn(*given), softcap)
    losses, grad = found_on(ranks, world_size, drawn, given, 16, softcap)
    torch.testing.assert_close(losses.double(), expected_losses, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["none", "one", "first"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_few_or_no_tokens_under_the_loss(ranks, world_size, kind, dtype):
    given = extremes(kind, dtype)
    expected_losses, expected_grad = expected_of(given)
    losses, grad = found_on(ranks, world_size, extremes, (kind, dtype), 8)
    torch.testing.assert_close(losses.double(), expected_losses, rtol=1e-6, atol=1e-6)
    assert not grad[given[2] == 0].any()
    torch.testing.assert_close(grad.double(), expected_grad, atol=torch.finfo(dtype).eps, rtol=0)


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

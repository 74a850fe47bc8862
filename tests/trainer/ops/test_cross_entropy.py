"""Cross entropy: errors, gradients, divided vocabularies, ignored labels, nonfinite logits."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.trainer.ops.op_checks import (
    call,
    check_against_oracle,
    check_same_bits,
    check_threads,
    drawn,
    here,
    poisoned,
    sparse_tensor,
)
from tests.trainer.spawn import Ranks
from trainer.model.tensor_parallel.collectives import TensorParallel
from trainer.model.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from trainer.ops.cross_entropy import CROSS_ENTROPY, LossTerms, VocabColumns, counted_from
from trainer.ops.dispatch.library import load_library
from trainer.ops.dispatch.registry import Kernels
from trainer.ops.operation import Implementation

pytestmark = pytest.mark.usefixtures("kernel_library")

PLAIN, EVERYTHING = LossTerms(), LossTerms(z_loss=0.02, label_smoothing=0.1, ignore_index=-7)
TERMS = {
    "plain": PLAIN,
    "z-loss": LossTerms(z_loss=0.01),
    "smoothing": LossTerms(label_smoothing=0.2),
    "all": EVERYTHING,
    "softcap": replace(EVERYTHING, softcap=3.0),
}
SHAPES = [
    ((1, 1), 1),
    ((4, 17), 17),
    ((5, 123), 120),
    ((3, 8191), 8000),
    ((37, 1000), 999),
    ((0, 64), 60),
    ((2, 3, 40), 40),
]
BACKENDS = ["native", "reference"]
# The function for small calls, as a further implementation.
LOSS = replace(
    CROSS_ENTROPY, implementations={**CROSS_ENTROPY.implementations, "torch": Implementation(CROSS_ENTROPY.small)}
)


def function(backend):
    return LOSS.implementations[backend].function


def arguments(shape, num_valid, dtype, terms=PLAIN):
    """Arguments with every third token ignored, and large padding that must have no effect."""
    logits = (drawn(shape, torch.float64) * 3.0).to(dtype)
    logits[..., num_valid:] = 1e4
    generator = torch.Generator("cpu").manual_seed(1)
    labels = here(torch.randint(0, num_valid, shape[:-1], generator=generator, device="cpu"))
    labels.view(-1)[2::3] = terms.ignore_index
    return logits.requires_grad_(), labels, VocabColumns(0, num_valid, num_valid), terms


def formula(logits, labels, columns, terms):
    """The definition in torch operations, with autograd's gradient."""
    valid = logits[..., : columns.num_valid]
    valid = valid if terms.softcap is None else terms.softcap * torch.tanh(valid / terms.softcap)
    log_z = valid.logsumexp(-1)
    is_ignored = labels == terms.ignore_index
    picked = valid.gather(-1, labels.masked_fill(is_ignored, 0).unsqueeze(-1)).squeeze(-1)
    if terms.label_smoothing:  # with -inf among the logits the mean is -inf, and 0 * -inf is NaN
        picked = (1.0 - terms.label_smoothing) * picked + terms.label_smoothing * valid.mean(-1)
    return (log_z - picked + terms.z_loss * log_z.square()).masked_fill(is_ignored, 0.0)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("terms", ["plain", "all", "softcap"])
@pytest.mark.parametrize(("shape", "num_valid"), SHAPES, ids=str)
def test_errors_are_those_of_rounding(shape, num_valid, terms, dtype):
    given = arguments(shape, num_valid, dtype, TERMS[terms])
    check_against_oracle(CROSS_ENTROPY, "native", given, oracle=formula, consumes=True)


@pytest.mark.cpu_only
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize(("shape", "num_valid"), SHAPES, ids=str)
def test_errors_of_small_calls_are_those_of_rounding(shape, num_valid, terms, dtype):
    given = arguments(shape, num_valid, dtype, TERMS[terms])
    # torch sums the smoothed losses of a row sequentially in float32.
    slack = 16.0 if TERMS[terms].label_smoothing else 4.0
    check_against_oracle(LOSS, "torch", given, slack=slack, oracle=formula, consumes=True)


@pytest.mark.cpu_only
@pytest.mark.parametrize("terms", TERMS)
def test_reference_torch_is_right(terms, dtype):
    logits, labels, columns, terms = arguments((37, 1000), 999, dtype, TERMS[terms])
    losses = function("reference")(logits * 1, labels, columns, terms)
    exact = logits.detach().double().requires_grad_()
    expected = formula(exact, labels, columns, terms)
    weights = drawn(losses.shape, losses.dtype, seed=3)
    (losses * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(losses.double(), expected, rtol=2e-6, atol=2e-6)
    bound = 2e-6 if losses.dtype == dtype else torch.finfo(dtype).eps
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=2 * bound, atol=bound * 3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("terms", TERMS)
def test_gradients_are_those_of_finite_differences(terms, backend):
    """Computed by hand, because gradcheck runs backward more than once."""
    logits, *rest = arguments((4, 6), 5, torch.float64, TERMS[terms])
    weights = drawn((4,), torch.float64, seed=2)
    (function(backend)(logits * 1, *rest) * weights).sum().backward()
    found = torch.zeros_like(logits)
    for place in torch.ones(4, 6).nonzero():
        step = torch.zeros(4, 6, dtype=torch.float64)
        step[tuple(place)] = 1e-5
        ends = [(function(backend)(logits.detach() + s * step, *rest) * weights).sum() for s in (1, -1)]
        found[tuple(place)] = (ends[0] - ends[1]) / 2e-5
    torch.testing.assert_close(logits.grad, found, rtol=1e-6, atol=1e-8)


@pytest.mark.cpu_only
def test_bits_do_not_depend_on_threads(dtype):
    check_threads(function("native"), arguments((307, 1000), 1000, dtype, EVERYTHING))


def divided(backend, logits, labels, vocab_size, terms, parts):
    """Losses of every part and all gradients, with columns divided as over ``parts`` ranks."""
    width = logits.shape[-1] // parts
    columns = [
        VocabColumns(first, min(max(vocab_size - first, 0), width), vocab_size)
        for first in range(0, parts * width, width)
    ]
    shards = [part.clone().requires_grad_() for part in logits.split(width, -1)]
    found = {}

    def note(local_max, sums, of):
        found[of.first] = local_max.clone(), sums.clone()
        return local_max, sums

    for shard, where in zip(shards, columns, strict=True):
        function(backend)(shard.detach().clone(), labels, where, terms, note)
    global_max = torch.stack([local_max for local_max, _ in found.values()]).amax(0)
    total = torch.stack([counted_from(global_max, *found[where.first], where) for where in columns]).sum(0)

    def combine(local_max, sums, of):
        torch.testing.assert_close((local_max, sums), found[of.first], rtol=0, atol=0, equal_nan=True)
        return global_max, total

    weights = drawn(labels.shape, total.dtype, seed=5).abs()
    losses = []
    for shard, where in zip(shards, columns, strict=True):
        # A single part needs no exchange.
        losses.append(function(backend)(shard * 1, labels, where, terms, combine if parts > 1 else None))
        (losses[-1] * weights).sum().backward()
    return losses, torch.cat([shard.grad for shard in shards], -1), weights


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("terms", ["plain", "all"])
@pytest.mark.parametrize(("vocab_size", "padded"), [(64, 64), (61, 64), (5, 64), (16, 64), (1, 4)])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_divided_vocabulary_has_the_loss_of_the_whole(parts, vocab_size, padded, terms, dtype, backend):
    terms = TERMS[terms]
    logits = F.pad(
        (drawn((vocab_size + 3, vocab_size), torch.float64) * 3.0).to(dtype), (0, padded - vocab_size), value=1e4
    )
    # Every label, including the labels at the borders of each part, and some ignored labels.
    labels = torch.cat((torch.arange(vocab_size), torch.full((3,), terms.ignore_index)))
    with poisoned():
        losses, grad, weights = divided(backend, logits, labels, vocab_size, terms, parts)
    whole = logits.double().requires_grad_()
    expected = formula(whole, labels, VocabColumns(0, vocab_size, vocab_size), terms)
    (expected * weights).sum().backward()
    for part in losses:
        torch.testing.assert_close(part, losses[0], rtol=0, atol=0)
        torch.testing.assert_close(part.double(), expected, rtol=4e-6, atol=4e-6)
        assert not part[-3:].any()
    bound = 4e-6 if dtype in (torch.float32, torch.float64) else 1.5 * torch.finfo(dtype).eps
    torch.testing.assert_close(grad.double(), whole.grad, rtol=bound, atol=bound)
    assert not grad[:, vocab_size:].any()
    assert not grad[-3:].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_huge_logits(parts, backend):
    terms = LossTerms(label_smoothing=0.1)
    logits = (drawn((9, 64), torch.float64) * 1e4).float()
    logits[0] = -1e4
    # Masked columns: a masked first or last column must not affect the others.
    logits[1:3] /= 1e4
    logits[1, 0], logits[2, -1] = torch.finfo(torch.float32).min, -1e6
    labels = torch.arange(9) * 7
    losses, grad, weights = divided(backend, logits, labels, 64, terms, parts)
    whole = logits.double().requires_grad_()
    expected = formula(whole, labels, VocabColumns(0, 64, 64), terms)
    (expected * weights).sum().backward()
    torch.testing.assert_close(losses[0].double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad.double(), whole.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_infinitely_unlikely_columns(parts, dtype, backend):
    """Logits of -inf, also in whole parts: exp(-inf - -inf) must not make NaN."""
    logits = drawn((8, 16), torch.float64).to(dtype)
    logits[:, ::3] = -torch.inf
    logits[2, :12] = -torch.inf
    logits[3, 4:] = -torch.inf
    labels = torch.tensor([1, 14, 13, 2, 4, 5, 3, 8])  # the label of row 6 is an unlikely column
    losses, grad, weights = divided(backend, logits, labels, 16, PLAIN, parts)
    whole = logits.double().requires_grad_()
    expected = formula(whole, labels, VocabColumns(0, 16, 16), PLAIN)
    (expected * weights).sum().backward()
    assert torch.isinf(losses[0]).tolist() == [row == 6 for row in range(8)]
    torch.testing.assert_close(losses[0].double(), expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(grad.double(), whole.grad, rtol=0, atol=2 * torch.finfo(dtype).eps)
    # Only the label of row 6.
    assert grad[logits == -torch.inf].count_nonzero() <= 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("spoil", ["nan", "negative nan", "inf", "nothing but -inf"])
def test_nan_stays_nan(spoil, parts, backend):
    logits = drawn((3, 16), torch.float32)
    if spoil == "nothing but -inf":
        logits[1] = -torch.inf
    else:
        logits[1, 5] = {"nan": torch.nan, "negative nan": -torch.nan, "inf": torch.inf}[spoil]
    losses, grad, _ = divided(backend, logits, torch.tensor([1, 2, 3]), 16, PLAIN, parts)
    for part in losses:
        assert part.isnan().tolist() == [False, True, False]
    assert grad.isnan().any(1).tolist() == [False, True, False]


def check_labels_outside_the_vocabulary(backend):
    logits, columns = drawn((4, 8), torch.float32), VocabColumns(0, 6, 6)
    losses = function(backend)(logits, torch.tensor([5, 6, -1, -100]), columns, PLAIN)
    assert losses.isnan().tolist() == [False, True, True, False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_label_outside_the_vocabulary_makes_the_loss_nan(backend):
    check_labels_outside_the_vocabulary(backend)


@pytest.mark.cpu_only
def test_a_label_outside_the_vocabulary_makes_the_loss_of_a_small_call_nan():
    check_labels_outside_the_vocabulary("torch")


def test_tokens_without_a_loss_are_not_read(dtype):
    logits = torch.full((3, 70), torch.nan, dtype=dtype)
    logits[1] = drawn((70,), dtype)
    logits.requires_grad_()
    labels = torch.tensor([-100, 3, 4])
    losses = function("native")(logits * 1, labels, VocabColumns(0, 70, 70), PLAIN)
    losses.backward(torch.tensor([1.0, 1.0, 0.0]).to(losses))
    assert losses[0] == 0.0
    assert losses[2].isnan()
    assert not logits.grad[0].any()
    assert not logits.grad[2].any()
    assert logits.grad[1].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_logits_become_their_gradient(dtype, backend):
    logits = torch.randn(4, 9, dtype=dtype, requires_grad=True) * 1
    handed = []
    logits.register_hook(lambda gradient: handed.append(gradient.data_ptr()))
    losses = function(backend)(logits, torch.zeros(4, dtype=torch.int64), VocabColumns(0, 9, 9), PLAIN)
    losses.sum().backward(retain_graph=True)
    assert handed == [logits.data_ptr()]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_beyond_two_to_the_31_elements(dtype):
    rows, width = (1 << 21) + 3, 1024
    keeps = int(dtype == torch.float32)
    logits, labels = sparse_tensor((rows, width), dtype), sparse_tensor((rows,), torch.int64)
    maximum, exp_sum, label_logit, grads = (sparse_tensor((rows,), torch.float32) for _ in range(4))
    few = drawn((2, width), dtype)
    logits[-2:], labels[-2:], grads[-2:] = few, torch.tensor([1, 1023]), 1.0
    where = (width, 0, width, width, -100)
    call(
        "llmctl_cpu_cross_entropy_stats",
        *(dtype, logits, labels, maximum, exp_sum, label_logit, None, None, *where, 0.0, 0.0, keeps, rows - 2, rows),
    )
    call(
        "llmctl_cpu_cross_entropy_grad",
        *(dtype, logits, labels, grads, maximum, maximum, exp_sum, *where, 0.0, 0.0, keeps, rows - 2, rows),
    )
    ends = few.clone()
    alone, sums = torch.ops.llmctl.cross_entropy_stats(
        ends, labels[-2:].clone(), 0, width, width, -100, False, bool(keeps)
    )
    check_same_bits([maximum[-2:], exp_sum[-2:], label_logit[-2:]], [alone, *sums])
    torch.ops.llmctl.cross_entropy_grad_(
        ends, labels[-2:].clone(), torch.ones(2), alone, alone, sums[0], 0, width, width, -100, 0.0, 0.0, bool(keeps)
    )
    check_same_bits([logits[-2:]], [ends])
    assert not logits[:2].any()
    assert not logits[rows - 4 : rows - 2].any()


def test_mismatched_arguments_are_refused():
    stats = torch.ops.llmctl.cross_entropy_stats
    logits, labels = torch.ones(3, 8), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="labels are not one for each of the 3 rows"):
        stats(logits, labels[:2], 0, 8, 8, -100, False, False)
    with pytest.raises(RuntimeError, match="labels are not int64"):
        stats(logits, labels.int(), 0, 8, 8, -100, False, False)
    with pytest.raises(RuntimeError, match="9 valid columns are not among 8"):
        stats(logits, labels, 0, 9, 9, -100, False, False)
    with pytest.raises(RuntimeError, match="without gaps"):
        stats(torch.ones(8, 3).t(), labels, 0, 8, 8, -100, False, False)
    with pytest.raises(RuntimeError, match="cross_entropy_losses: 9 valid columns are not among 8"):
        torch.ops.llmctl.cross_entropy_losses(logits, labels, 9, -100, 0.0, 0.0, False)
    for wrong in (logits.bfloat16(), *([logits] if logits.is_cuda else [])):
        with pytest.raises(RuntimeError, match="only float32 and float64 logits on a CPU become exponentials"):
            stats(wrong, labels, 0, 8, 8, -100, False, True)


def on_a_rank(rank, world_size, library, dtype):
    """Losses and this rank's gradient for a vocabulary of 13 in 16 columns."""
    load_library(library)
    tp = TensorParallel(world_size, rank, dist.group.WORLD)
    logits, labels, *_ = arguments((12, 16), 13, dtype, EVERYTHING)
    local = logits.detach().chunk(world_size, -1)[rank].clone().requires_grad_()
    kernels = Kernels(cross_entropy=function("native"))
    losses = vocab_parallel_cross_entropy(local * 1, labels, 13, tp, kernels, EVERYTHING)
    losses.sum().backward()
    return losses.detach(), local.grad


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.cpu_only
def test_real_ranks_have_the_loss_of_one(kernel_library, ranks, dtype):
    results = ranks.run(on_a_rank, kernel_library.path, dtype)
    logits, labels, columns, terms = arguments((12, 16), 13, dtype, EVERYTHING)
    expected = function("native")(logits * 1, labels, columns, terms)
    expected.sum().backward()
    for losses, _ in results:
        torch.testing.assert_close(losses, expected, rtol=2e-6, atol=2e-6)
    grad = torch.cat([part for _, part in results], -1)
    torch.testing.assert_close(grad.float(), logits.grad.float(), rtol=0, atol=4 * torch.finfo(dtype).eps)

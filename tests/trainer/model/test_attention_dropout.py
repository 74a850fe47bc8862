"""Attention with dropout keeps neither scores nor masks, and draws the same masks again."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.trainer.model import dense_attention as dense
from tests.trainer.model.test_attention import core, forward_pass
from trainer.distributed.random_streams import MicroBatchRandomness, StepRandomness
from trainer.model.attention.core_attention import AttentionCore, attend
from trainer.model.context import ParallelAxes
from trainer.model.tensor_parallel.collectives import TensorParallel
from trainer.ops.attention.settings import AttentionSettings

RANDOMNESS = StepRandomness(1, 2).micro_batch(5)
DROPOUT = 0.1


def dropped(
    layer: AttentionCore, randomness: MicroBatchRandomness, heads: int, length: int, batch: int = 1
) -> torch.Tensor:
    """Dropout mask [B, A, S, S] of bidirectional attention, read off its output: equal shares of unit values."""
    query = torch.zeros(batch, heads, length, length, dtype=torch.float64)
    value = torch.eye(length, dtype=torch.float64).expand(batch, heads, length, length)
    return attend(query, query, value, forward_pass(None, randomness), layer) == 0


def two_way(layer: int = 3, **axes: TensorParallel) -> AttentionCore:
    """Bidirectional attention in float64 with dropout."""
    backend = core("auto").backend
    return AttentionCore(layer, DROPOUT, ParallelAxes(**axes), AttentionSettings(1.0, causal=False), backend)


def test_weights_are_dropped_at_the_rate_and_independently() -> None:
    length = 512
    mask = dropped(two_way(), RANDOMNESS, 4, length, batch=2).double()
    # Five standard deviations of the mean of as many independent draws.
    assert abs(float(mask.mean()) - DROPOUT) < 5 * (DROPOUT * (1 - DROPOUT) / mask.numel()) ** 0.5
    for dim in (0, 1, 2, 3):
        rest = [other for other in range(4) if other != dim]
        spread = (DROPOUT * (1 - DROPOUT) / (mask.numel() // mask.shape[dim])) ** 0.5
        assert float((mask.mean(rest) - DROPOUT).abs().max()) < 5 * spread
    others = [
        *(mask.roll(shift, dim) for dim, shift in ((0, 1), (1, 1), (2, 1), (2, 64), (3, 1), (3, 64))),
        dropped(two_way(layer=4), RANDOMNESS, 4, length, batch=2).double(),
        dropped(two_way(), StepRandomness(1, 3).micro_batch(5), 4, length, batch=2).double(),
        dropped(two_way(), StepRandomness(1, 2).micro_batch(6), 4, length, batch=2).double(),
        dropped(two_way(), StepRandomness(2, 2).micro_batch(5), 4, length, batch=2).double(),
    ]
    for other in others:
        correlation = ((mask - DROPOUT) * (other - DROPOUT)).mean() / (DROPOUT * (1 - DROPOUT))
        assert abs(float(correlation)) < 5 * mask.numel() ** -0.5
    # No two rows or columns are alike or each other's shifted copies, as keys of rows that repeat would make them.
    rows = (mask - DROPOUT).flatten(0, 2)[:1024]
    for keys in (rows, rows[:512].t()):
        products = keys @ keys.t() / (DROPOUT * (1 - DROPOUT) * keys.shape[1])
        assert float(products.fill_diagonal_(0.0).abs().max()) < 7 * keys.shape[1] ** -0.5


@pytest.mark.parametrize("bounds", [None, [(0, 100, 512)]], ids=["whole", "documents"])
@pytest.mark.parametrize("causal", [True, False])
def test_neither_scores_nor_masks_are_kept(causal: bool, bounds: dense.Bounds | None) -> None:
    inputs, grad = dense.heads(1, 2, 1, 512, 4, torch.float32)
    layer = core("auto", DROPOUT, torch.float32)
    layer = AttentionCore(3, DROPOUT, ParallelAxes(), AttentionSettings(0.5, causal=causal), layer.backend)
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = attend(*inputs, forward_pass(bounds, RANDOMNESS), layer)
    # Query, key, value, output and the logarithm of the sums; the scores alone are 2 x 512 x 512 x 4 bytes.
    assert sum(kept) == 512 * 4 * (2 * 4 + 4 + 4 + 2 * 4 + 2)
    assert output.grad_fn is not None
    attention = output.grad_fn.attention  # type: ignore[attr-defined]
    assert attention.weights.rows.nbytes + attention.weights.columns.nbytes == 4 * (2 * 2 * 512 + 512)
    expected = dense.attention(
        *inputs, bounds, dense.kept_weights(1, 2, 512, 512, DROPOUT, RANDOMNESS), DROPOUT, causal=causal
    )
    found = dense.gradients(output, inputs, grad)
    assert dense.worst(found, dense.gradients(expected, inputs, grad)) < 2e-6


@pytest.mark.parametrize("causal", [True, False])
def test_attention_with_a_bias_or_key_mask_keeps_only_those(causal: bool) -> None:
    inputs, _ = dense.heads(2, 2, 2, 256, 4, torch.float32)
    bias = torch.randn(2, 256, 256).requires_grad_()
    key_mask = (torch.arange(256) < 200).expand(2, -1)
    backend = core("auto", DROPOUT, torch.float32).backend
    layer = AttentionCore(3, DROPOUT, ParallelAxes(), AttentionSettings(0.5, causal=causal), backend)
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    for extra in ({"bias": bias}, {"key_mask": key_mask}):
        storages.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            attend(*inputs, forward_pass(None, RANDOMNESS), layer, **extra).sum().backward()
        storages.pop(bias.data_ptr(), None)
        assert sum(storages.values()) < 2 * 2 * 256 * 256


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_fused_and_unfused_attention_agree(groups: int, dtype: torch.dtype, limit: float) -> None:
    for length, bounds in ((200, None), (123, ((0, 5, 64, 123), (0, 123)))):
        inputs, grad = dense.heads(2, 4, groups, length, 8, dtype)
        outputs = [
            attend(*inputs, forward_pass(bounds, RANDOMNESS), core(backend, 0.3, dtype))
            for backend in ("auto", "unfused")
        ]
        found, expected = (dense.gradients(output, inputs, grad) for output in outputs)
        assert dense.worst(found, expected) < limit


def test_ranks_of_tp_have_the_masks_of_their_heads() -> None:
    whole = dropped(two_way(), RANDOMNESS, 4, 33)
    parts = [dropped(two_way(tp=TensorParallel(size=2, rank=rank)), RANDOMNESS, 2, 33) for rank in range(2)]
    assert torch.equal(torch.cat(parts, dim=1), whole)


class SaysCuda(torch.Tensor):
    """A tensor in CPU memory that says it lies on a GPU: torch's CPU call stands in for the GPU kernel."""

    is_cuda = True


@pytest.mark.parametrize(
    ("backend", "bounds", "probability"),
    [
        ("auto", None, DROPOUT),
        ("unfused", None, None),
        ("auto", [(0, 7, 16)], None),
    ],
)
def test_gpus_draw_masks_in_the_library_where_the_call_has_them(backend, bounds, probability) -> None:
    inputs, _ = dense.heads(1, 4, 4, 16, 8)
    heads = [part.as_subclass(SaysCuda) for part in inputs]

    before = torch.random.get_rng_state()
    fake = mock.patch(
        "trainer.ops.attention.torch_call.F.scaled_dot_product_attention", wraps=F.scaled_dot_product_attention
    )
    with fake as call:
        first, again = (attend(*heads, forward_pass(bounds, RANDOMNESS), core(backend, DROPOUT)) for _ in range(2))
        other = attend(*heads, forward_pass(bounds, StepRandomness(1, 3).micro_batch(5)), core(backend, DROPOUT))
        assert [one.kwargs["dropout_p"] for one in call.call_args_list] == (
            [] if probability is None else 3 * [probability]
        )
        call.reset_mock()
        attend(*inputs, forward_pass(bounds, RANDOMNESS), core(backend, DROPOUT))
        assert not call.called
    # A stream of its own: repeated with its address, and without a trace in torch's generator.
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)

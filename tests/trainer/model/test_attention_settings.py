"""Windows, softcap, sinks, value widths, masks and caches against dense attention: output and all gradients."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.trainer.model import dense_attention as dense
from tests.trainer.model.test_attention import CPU, LIMITS, forward_pass, model
from trainer.distributed.mesh import ParallelMesh
from trainer.distributed.random_streams import StepRandomness
from trainer.model.attention.core_attention import AttentionCore, attend
from trainer.model.attention.self_attention import SelfAttention
from trainer.model.context import ParallelAxes
from trainer.model.sharding import ParameterBuilder
from trainer.ops.attention import tiles
from trainer.ops.attention.backend import choose_backend
from trainer.ops.attention.interface import Packing
from trainer.ops.attention.settings import AttentionSettings
from trainer.ops.attention.tiles import Band, row_blocks, whole_tiles

LENGTH, WIDTH, HEADS = 37, 8, 4
BOUNDS = ((0, 9, 10, LENGTH), (0, LENGTH))
RANDOMNESS = StepRandomness(1, 2).micro_batch(5)
SINKS = torch.linspace(-1.0, 2.0, HEADS, dtype=torch.float64)


def core(backend: str, value_width: int = WIDTH, dropout: float = 0.0, **settings: object) -> AttentionCore:
    shape = {"multi_latent_attention": True, "qk_head_dim": WIDTH, "v_head_dim": value_width}
    if settings.get("softcap"):
        shape["attn_logit_softcapping"] = settings["softcap"]
    chosen = choose_backend(model(backend, **shape), torch.float64, CPU)
    return AttentionCore(3, dropout, ParallelAxes(), AttentionSettings(**{"scale": 0.3, **settings}), chosen)


def deviation(layer: AttentionCore, bounds: dense.Bounds | None, sinks: torch.Tensor | None, **lengths: int) -> float:
    """Largest relative deviation from dense attention of output and gradients, sinks' included."""
    value_width = lengths.pop("value_width", WIDTH)
    queries, keys = lengths.get("queries", LENGTH), lengths.get("keys", LENGTH)
    inputs, grad = dense.heads(2, HEADS, 2, queries, WIDTH, keys=keys, value_width=value_width)
    kept = dense.kept_weights(2, HEADS, queries, keys, layer.dropout, RANDOMNESS) if layer.dropout else None
    own = None if sinks is None else sinks.clone().requires_grad_()
    leaves = inputs if own is None else [*inputs, own]
    randomness = RANDOMNESS if layer.dropout else None
    found = attend(*inputs, forward_pass(bounds, randomness), layer, sinks=own)
    form = vars(layer.settings)
    expected = dense.attention(*inputs, bounds, kept, layer.dropout, sinks=own, **form)
    return dense.worst(dense.gradients(found, leaves, grad), dense.gradients(expected, leaves, grad))


@pytest.fixture(params=[tiles.MAX_SCORES, 200, 100], ids=["one block", "blocks", "small blocks"])
def blocks(request, monkeypatch) -> None:
    """Kernels with all rows in one block, and in blocks of few rows."""
    monkeypatch.setattr(tiles, "_FEWEST_ROWS", min(64, request.param // 50))
    monkeypatch.setattr(row_blocks, "__defaults__", (request.param,))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("backend", ["auto", "unfused"])
def test_all_settings_together_equal_dense_attention(backend, dropout) -> None:
    options = itertools.product((None, 5), (None, 1.5), (None, SINKS), (WIDTH, 5), (None, BOUNDS))
    for window, softcap, sinks, value_width, bounds in options:
        layer = core(backend, value_width, dropout, window=window, softcap=softcap)
        found = deviation(layer, bounds, sinks, value_width=value_width)
        assert found < 1e-12, (window, softcap, sinks, value_width, bounds)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attention_in_both_directions(dropout) -> None:
    for backend, softcap, sinks in itertools.product(("auto", "unfused"), (None, 1.5), (None, SINKS)):
        layer = core(backend, dropout=dropout, causal=False, softcap=softcap)
        for bounds in (None, BOUNDS):
            assert deviation(layer, bounds, sinks) < 1e-12
        assert deviation(layer, None, sinks, keys=11) < 1e-12, "cross attention"


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("new", [1, 3, 20])
def test_a_cache_gives_what_the_last_positions_of_whole_sequences_have(new) -> None:
    for backend, window, softcap, sinks in itertools.product(
        ("auto", "unfused"), (None, 4, 30), (None, 1.5), (None, SINKS)
    ):
        layer = core(backend, window=window, softcap=softcap)
        inputs, _ = dense.heads(2, HEADS, 2, LENGTH, WIDTH)
        query, key, value = (part.detach() for part in inputs)
        whole = attend(query, key, value, forward_pass(None), layer, sinks=sinks)
        last = attend(query[:, :, -new:], key, value, forward_pass(None), layer, sinks=sinks)
        assert (whole[:, :, -new:] - last).abs().max() < 1e-12
        assert deviation(layer, None, sinks, queries=new) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_settings_in_other_dtypes(dtype) -> None:
    for softcap, sinks in ((None, SINKS), (2.0, None)):
        keys = {} if softcap is None else {"attn_logit_softcapping": softcap}
        settings = AttentionSettings(0.3, softcap, window=5)
        layer = AttentionCore(3, 0.0, ParallelAxes(), settings, choose_backend(model("auto", **keys), dtype, CPU))
        inputs, grad = dense.heads(2, HEADS, 2, LENGTH, WIDTH, dtype)
        own = None if sinks is None else sinks.to(dtype).requires_grad_()
        leaves = inputs if own is None else [*inputs, own]
        found = attend(*inputs, forward_pass(BOUNDS), layer, sinks=own)
        expected = dense.attention(*inputs, BOUNDS, sinks=own, **vars(settings))
        worst = dense.worst(dense.gradients(found, leaves, grad), dense.gradients(expected, leaves, grad))
        assert worst <= LIMITS[dtype]


def test_a_window_counts_the_query_itself() -> None:
    # Gemma 2's off-by-one: with a window of 1 a query sees only its own key, with 2 also the key before.
    inputs, _ = dense.heads(1, HEADS, HEADS, 9, WIDTH)
    query, key, value = (part.detach() for part in inputs)
    for backend in ("auto", "unfused"):
        assert torch.allclose(attend(query, key, value, forward_pass(None), core(backend, window=1)), value)
        found = attend(query * 0, key, value, forward_pass(None), core(backend, window=2))
        before = torch.cat((value[:, :, :1], value[:, :, :-1]), dim=2)
        assert torch.allclose(found, (value + before) / 2)


def test_one_new_position_sees_exactly_the_window() -> None:
    (tile,) = whole_tiles(1, None, 100, window=8)
    assert (tile.query, tile.key, tile.band) == ((0, 1), (92, 100), Band())


@pytest.mark.parametrize("window", [128, 1000])
def test_the_cost_of_a_window_is_linear_in_the_length(window) -> None:
    costs = []
    for length in (10_000, 20_000):
        (tile,) = whole_tiles(length, None, window=window)
        blocks = row_blocks(length, length, tile.band)
        scores = [(block.query[1] - block.query[0]) * (block.key[1] - block.key[0]) for block in blocks]
        assert max(scores) <= tiles.MAX_SCORES
        costs.append(sum(scores))
    assert costs[0] < 10_000 * window * 2.1
    assert 1.9 < costs[1] / costs[0] < 2.1


def test_documents_shorter_than_the_window_are_whole_squares() -> None:
    own = whole_tiles(30, [(0, 4, 30)], window=6)
    assert [tile.band for tile in own] == [Band(None, 0), Band(-5, 0)]
    packing = Packing.build(own, 1, 30, CPU)
    assert packing.starts.tolist() == [0, 4, 30]


def test_no_path_keeps_scores_for_backward() -> None:
    inputs, _ = dense.heads(1, HEADS, 2, 512, 4, value_width=6)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        for form in ({"window": 100}, {"softcap": 1.5}, {"window": 7, "softcap": 1.5}):
            attend(*inputs, forward_pass(None), core("auto", 6, **form), sinks=SINKS)
    assert max(kept) == 512 * HEADS * 6


BIAS = torch.randn(HEADS, 5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
KEY_MASK = torch.tensor([[True] * 7, [True, True, True, False, False, False, False]])


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_bias_and_key_mask_equal_dense_attention(dropout, causal) -> None:
    inputs, grad = dense.heads(2, HEADS, 2, 5, WIDTH, keys=7, value_width=6)
    kept = dense.kept_weights(2, HEADS, 5, 7, dropout, RANDOMNESS) if dropout else None
    for bias, key_mask, softcap, sinks in itertools.product((None, BIAS), (None, KEY_MASK), (None, 1.5), (None, SINKS)):
        own = [part.clone().requires_grad_() for part in (bias, sinks) if part is not None]
        extra = {"bias": None if bias is None else own[0], "sinks": None if sinks is None else own[-1]}
        layer = core("auto", 6, dropout, causal=causal, softcap=softcap)
        leaves = [*inputs, *own]
        randomness = RANDOMNESS if dropout else None
        found = attend(*inputs, forward_pass(None, randomness), layer, key_mask=key_mask, **extra)
        expected = dense.attention(
            *inputs, None, kept, dropout, scale=0.3, softcap=softcap, causal=causal, key_mask=key_mask, **extra
        )
        worst = dense.worst(dense.gradients(found, leaves, grad), dense.gradients(expected, leaves, grad))
        assert worst < 1e-12, (bias is None, key_mask is None, softcap, sinks)


@pytest.mark.parametrize(
    ("lengths", "bounds", "extra", "says"),
    [
        ((5, 4), None, {}, "causal attention of 5 queries needs as many keys or more, not 4"),
        ((4, 5), [(0, 4)], {}, "within documents needs as many keys as queries"),
        ((4, 4), [(0, 4)], {"bias": torch.zeros(HEADS, 4, 4)}, "neither bias nor key mask"),
    ],
)
def test_what_attention_does_not_have_is_refused(lengths, bounds, extra, says) -> None:
    inputs, _ = dense.heads(1, HEADS, 2, lengths[0], WIDTH, keys=lengths[1])
    with pytest.raises(ValueError, match=says):
        attend(*inputs, forward_pass(bounds), core("auto"), **extra)


def test_a_window_in_both_directions_is_refused() -> None:
    with pytest.raises(ValueError, match="window needs causal attention"):
        AttentionSettings(1.0, causal=False, window=3)


def test_settings_come_from_the_keys_of_the_layer() -> None:
    gemma = model("auto", softmax_scale=0.25, attn_logit_softcapping=50.0, window_size=6, window_layers=[True])
    assert AttentionSettings.of(gemma, 0) == AttentionSettings(0.25, 50.0, window=6)
    assert AttentionSettings.of(model("auto"), 0) == AttentionSettings(8**-0.5)
    latent = model("auto", multi_latent_attention=True, qk_head_dim=12, qk_pos_emb_head_dim=4, v_head_dim=6)
    assert AttentionSettings.of(latent, 0).scale == 0.25


def test_sinks_are_parameters_of_their_heads() -> None:
    parts = []
    for rank in range(2):
        builder = ParameterBuilder(7, ParallelMesh(tp=2, pp=1, dp=1, rank=rank), False, torch.float32, CPU)
        layer = SelfAttention(model("auto", attention_sinks=True), 0, builder, ParallelAxes())
        assert builder.layouts["sinks"].global_shape == (4,)
        parts.append(layer.sinks.shape)
    assert parts == [(2,), (2,)]

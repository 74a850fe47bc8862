"""ALiBi: slopes of the published programs, and channels that give every kernel the bias."""

from __future__ import annotations

import math

import pytest
import torch

from tests.trainer.model import dense_attention as dense
from tests.trainer.model.reference_case import LENGTH, reference_weights, stirred
from tests.trainer.model.reference_gpt import alibi_slope, reference_logits
from trainer.config.sections.model import ModelConfig
from trainer.data.samples.document_places import Documents
from trainer.model.attention.core_attention import AttentionCore, attend
from trainer.model.cache import KeyValueCache
from trainer.model.context import ForwardPass, ParallelAxes
from trainer.model.linear_bias import LinearBias, alibi_slopes
from trainer.ops.attention.backend import choose_backend
from trainer.ops.attention.settings import AttentionSettings
from trainer.pipeline.executor import forward_next

CPU = torch.device("cpu")
# Those of tests.trainer.model.test_attention, but in float32: the bias is a difference of larger products.
LIMITS = {torch.float64: 1e-12, torch.float32: 8e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# Width 12: the factor of the scores differs from powers of two, so that 16 bits round the slopes.
HEADS, GROUPS, WIDTH = 6, 3, 12
DOCUMENTS = ((0, 5, 64, 123), (0, 122, 123))


def model_of(**keys: object) -> ModelConfig:
    shape = {"num_layers": 1, "hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS}
    return ModelConfig.model_validate({**shape, "position_embedding_type": "alibi", **keys})


def of_program(count: int) -> list[float]:
    """Slopes by the authors' program, fairseq/models/transformer.py of attention_with_linear_biases."""

    def of_power(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**place for place in range(n)]

    if math.log2(count).is_integer():
        return of_power(count)
    closest = 2 ** math.floor(math.log2(count))
    return of_power(closest) + of_program(2 * closest)[0::2][: count - closest]


def test_slopes_are_those_of_the_authors_program() -> None:
    for count in range(1, 200):
        assert alibi_slopes(count) == pytest.approx(of_program(count), rel=1e-12), count
        assert alibi_slopes(count) == pytest.approx([alibi_slope(head, count) for head in range(count)], rel=1e-12)
    # Of the paper, section 3.
    assert alibi_slopes(8) == [2.0**-power for power in range(1, 9)]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_the_bias_is_right_at_far_positions_up_to_a_number_for_each_query(dtype: torch.dtype) -> None:
    bias = LinearBias.of(model_of(), 70_000, dtype, CPU)
    assert bias is not None
    positions = torch.tensor([0, 1, 255, 256, 257, 40_000, 65_535, 65_536, 65_537, 69_999])
    chosen = bias.at(positions[None])
    found = chosen.query[0].double() @ chosen.key[0, 0].double().mT * WIDTH**-0.5  # [A, Q, K]
    slopes = torch.tensor(alibi_slopes(HEADS), dtype=torch.float64)[:, None, None]
    right = slopes * (positions[None, :] - positions[:, None])
    constant = found.diagonal(dim1=1, dim2=2)[..., None]
    # The constant is small: it would take its bits from the scores of near keys.
    assert (constant.abs() <= 2**-15 * slopes * positions[:, None]).all()
    torch.testing.assert_close(found - constant, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bounds", [None, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("backend", ["fused", "unfused"])
def test_every_backend_equals_dense_attention_with_the_bias(
    backend: str, dtype: torch.dtype, bounds: tuple[tuple[int, ...], ...] | None
) -> None:
    model = model_of(attention_backend=backend)
    bias = LinearBias.of(model, 123, dtype, CPU)
    assert bias is not None
    inputs, grad = dense.heads(2, HEADS, GROUPS, 123, WIDTH, dtype)
    query, key, value = inputs
    core = AttentionCore(0, 0.0, ParallelAxes(), AttentionSettings.of(model, 0), choose_backend(model, dtype, CPU))
    forward_pass = ForwardPass(documents=None if bounds is None else Documents(bounds))
    output = attend(*bias.first(123).behind(query, key), value, forward_pass, core)
    places = torch.arange(123)
    slopes = torch.tensor(alibi_slopes(HEADS), dtype=torch.float64)[:, None, None]
    right = dense.attention(*inputs, bounds, bias=slopes * (places[None, :] - places[:, None]))
    expected = dense.gradients(right, inputs, grad.double())
    assert dense.worst(dense.gradients(output, inputs, grad), expected) <= LIMITS[dtype]


def test_a_tensor_parallel_rank_has_the_slopes_of_its_heads() -> None:
    whole = LinearBias.of(model_of(), 9, torch.float32, CPU)
    parts = [LinearBias.of(model_of(), 9, torch.float32, CPU, rank, 3) for rank in range(3)]
    assert whole is not None
    assert torch.equal(torch.cat([part.query for part in parts if part is not None]), whole.query)


def test_cached_tokens_have_the_logits_of_whole_sequences() -> None:
    config, built = stirred({"position_embedding_type": "alibi", "num_query_groups": 2})
    weights = reference_weights(built, torch.float32)
    generator = torch.Generator().manual_seed(3)
    # Rows of unequal and of equal lengths, which the cache reads in two ways.
    for lengths in ((5, 2, 3), (4, 4, 4)):
        rows = torch.randint(0, 61, (3, LENGTH), generator=generator)
        cache = KeyValueCache(lengths, LENGTH, CPU)
        tokens = rows[:, : max(lengths)]
        for step in range(LENGTH - max(lengths)):
            found = forward_next(built, tokens, cache)
            for row, length in enumerate(lengths):
                right = reference_logits(weights, config.model, rows[row : row + 1, : length + step])[0, -1]
                torch.testing.assert_close(found[row], right, rtol=1e-4, atol=1e-4)
            tokens = torch.stack([rows[row, length + step] for row, length in enumerate(lengths)])[:, None]


def test_a_sequence_beyond_the_positions_is_refused() -> None:
    bias = LinearBias.of(model_of(), 9, torch.float32, CPU)
    assert bias is not None
    with pytest.raises(ValueError, match="a sequence of 10 exceeds the 9 positions of the model"):
        bias.first(10)
    assert LinearBias.of(model_of(position_embedding_type="none"), 9, torch.float32, CPU) is None

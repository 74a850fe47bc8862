"""Position biases of T5: the buckets of the released models, and the gradient of the table."""

from __future__ import annotations

import pytest
import torch

from trainer.config.sections.model import ModelConfig
from trainer.distributed.mesh import ParallelMesh
from trainer.model.encoder_decoder.relative_bias import RelativeBias, distance_buckets
from trainer.model.sharding import ParameterBuilder


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("count", "max_distance"), [(32, 128), (8, 12), (12, 16), (64, 1000), (4, 3)])
def test_buckets_are_those_of_transformers(count: int, max_distance: int, causal: bool) -> None:
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    distances = torch.arange(-1500, 1500)
    expected = modeling.T5Attention._relative_position_bucket(distances, not causal, count, max_distance)
    found = distance_buckets(distances, count, max_distance, causal=causal)
    assert torch.equal(found, expected)
    assert set(found.tolist()) == set(range(count)) - ({count // 2} if not causal else set())


def test_a_16_bit_table_gets_the_sum_of_all_its_gradients() -> None:
    builder = ParameterBuilder(0, ParallelMesh(1, 1, 1, 0), False, torch.bfloat16, torch.device("cpu"))
    model = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    bias = RelativeBias(model, builder, causal=True)
    found = bias(600, 600)
    assert found.dtype == torch.bfloat16 and found.shape == (2, 600, 600)
    found.sum().backward()
    # 600 keys at distance 0, and all later keys, which count as distance 0; a bfloat16 sum of ones would end at 256.
    assert bias.weight.grad is not None
    expected = torch.tensor(600.0 + 600 * 599 / 2).to(torch.bfloat16)
    assert torch.equal(bias.weight.grad[0], expected.expand(2))
